"""Views of a tensor's memory as boxes of the tensor, found from addresses and strides without looking at an element."""

import itertools
import math

import torch

from torch_xmesh.weight_sync.boxes import Box

_Steps = list[tuple[int, int]]  # (how many, bytes from one to the next), ascending bytes


def memory_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors of the same elements in the same order at the same addresses."""
    steps = [(size, stride if size > 1 else 0) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(steps))


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor with elements, and the one behind its last byte."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.itemsize


def box_of_view(view: torch.Tensor, base: torch.Tensor) -> Box | None:
    """The box of ``base`` whose elements ``view`` has, in whatever order and of whatever dtype.

    None where they are not a box, are not all of ``base``, or share memory with one another.
    """
    if view.device != base.device:
        return None
    dims = [dim for dim, size in enumerate(base.shape) if size > 1]
    dims.sort(key=lambda dim: base.stride(dim))
    levels = [(base.itemsize, 1), *((base.shape[dim], base.stride(dim) * base.itemsize) for dim in dims)]
    begins = _digits(view.data_ptr() - base.data_ptr(), levels)
    if begins is None or not _is_nested(levels):
        return None
    sizes = [1] * len(levels)
    for count, stride in _merged(_steps(view)):
        if not _place(count, stride, levels, begins, sizes):
            return None
    if begins[0] != 0 or sizes[0] != base.itemsize:
        return None
    box = [(0, 1)] * base.dim()
    for dim, begin, size in zip(dims, begins[1:], sizes[1:], strict=True):
        box[dim] = (begin, begin + size)
    return tuple(box)


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether some byte belongs to elements of both, neither of them empty. Exact.

    Needs memory only for tensors whose strides have no common grid: of a bool per element of what they span together.
    """
    (a_begin, a_end), (b_begin, b_end) = byte_range(a), byte_range(b)
    if a.device != b.device or a_end <= b_begin or b_end <= a_begin:
        return False
    origin = min(a_begin, b_begin)
    boxes = [_on_grid(one, other, origin) for one, other in ((a, b), (b, a))]
    if boxes[0] is not None and boxes[1] is not None:
        return all(max(p, q) < min(p + n, q + m) for (p, n), (q, m) in zip(*boxes, strict=True))
    unit = math.gcd(a.itemsize, b.itemsize, a_begin - b_begin)
    seen = torch.zeros((max(a_end, b_end) - origin) // unit, dtype=torch.bool)
    cells_of(a, seen, origin, unit).fill_(True)
    return bool(cells_of(b, seen, origin, unit).any())


def shares_with_itself(tensor: torch.Tensor) -> bool:
    """Whether some byte belongs to two elements. Exact; needs memory only for strides that are not nested."""
    if _is_nested(_steps(tensor)):
        return False
    begin, end = byte_range(tensor)
    seen = torch.zeros((end - begin) // tensor.itemsize, dtype=torch.bool)
    cells_of(tensor, seen, begin, tensor.itemsize).fill_(True)
    return int(seen.sum()) < tensor.numel()


def cells_of(tensor: torch.Tensor, cells: torch.Tensor, origin: int, unit: int) -> torch.Tensor:
    """A tensor's part of ``cells``, which has one entry per ``unit`` bytes from the address ``origin`` on.

    Returns:
        a view of ``cells``, of the tensor's shape and one dim more: the units of an element.
    """
    strides = [stride * tensor.itemsize // unit for stride in tensor.stride()]
    begin = (tensor.data_ptr() - origin) // unit
    return cells.as_strided((*tensor.shape, tensor.itemsize // unit), (*strides, 1), begin)


def _steps(tensor: torch.Tensor) -> _Steps:
    steps = [
        (size, stride * tensor.itemsize) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    ]
    return sorted([(tensor.itemsize, 1), *steps], key=lambda step: step[1])


def _merged(steps: _Steps) -> _Steps:
    """The same bytes with as few steps as possible."""
    out: _Steps = []
    for count, stride in steps:
        if out and stride == out[-1][0] * out[-1][1]:
            out[-1] = (out[-1][0] * count, out[-1][1])
        else:
            out.append((count, stride))
    return out


def _is_nested(levels: _Steps) -> bool:
    """Whether each level's step goes beyond all that lies within: then an address has one index."""
    reach = 0
    for size, stride in levels:
        if size > 1 and stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def _digits(offset: int, levels: _Steps) -> list[int] | None:
    """The index of a byte along each level; None if it is not one of them."""
    out = []
    for size, stride in reversed(levels):
        index, offset = divmod(offset, stride) if stride else (0, offset)
        if not 0 <= index < size:
            return None
        out.append(index)
    return None if offset else out[::-1]


def _place(count: int, stride: int, levels: _Steps, begins: list[int], sizes: list[int]) -> bool:
    """Enters a step of a view into the sizes of the box, over several levels where it goes through whole ones."""
    for level, (size, level_stride) in enumerate(levels):
        if level_stride != stride or size == 1 or count == 1:
            continue
        if sizes[level] != 1:
            return False
        if count <= size - begins[level]:
            sizes[level] = count
            return True
        if begins[level] != 0 or count % size:
            return False
        sizes[level] = size
        count, stride = count // size, stride * size
    return count == 1


def _on_grid(tensor: torch.Tensor, other: torch.Tensor, origin: int) -> list[tuple[int, int]] | None:
    """The bytes of a tensor as (begin, size) per level of the grid of both tensors' strides; None if there is none."""
    strides = sorted({stride for _, stride in _steps(tensor) + _steps(other)})
    if strides[0] == 0 or any(above % stride for stride, above in itertools.pairwise(strides)):
        return None
    sizes = dict.fromkeys(strides, 1)
    for count, stride in _steps(tensor):
        if sizes[stride] != 1:
            return None
        sizes[stride] = count
    out = []
    offset = tensor.data_ptr() - origin
    for level, stride in reversed(list(enumerate(strides))):
        begin, offset = divmod(offset, stride)
        if level + 1 < len(strides) and (begin + sizes[stride]) * stride > strides[level + 1]:
            return None
        out.append((begin, sizes[stride]))
    return out
