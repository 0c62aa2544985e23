"""What a process has of named tensors: boxes of each, with the memory that each lies in."""

import io
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torch_xmesh.spec import Spec
from torch_xmesh.weight_sync.boxes import Box, extents, volume

_NO_TENSORS = (bool, int, float, complex, str, bytes, io.BytesIO, type(None))
_Ranges = list[tuple[int, int]]


def named_tensors(values: Any) -> dict[str, torch.Tensor]:
    """The tensors of a module or of nested dicts and lists, detached, by names as those of a ``state_dict``.

    Args:
        values: an ``nn.Module`` (its ``state_dict``: parameters and persistent buffers), or dicts, lists and tuples of
            tensors and modules, nested or not. Keys and positions are joined by dots: ``layers.0.weight``. Numbers,
            texts, None and ``io.BytesIO`` are passed over.

    Raises:
        ValueError: something else in place of a tensor or of the whole, a key that is neither a string nor an integer,
            or two tensors of one name.
    """
    if not isinstance(values, torch.nn.Module | Mapping | list | tuple):
        raise ValueError(f"weights are a module, a dict or a list of tensors, got {type(values).__name__}")
    out: dict[str, torch.Tensor] = {}
    for name, tensor in _walk("", values):
        if name in out:
            raise ValueError(f"two tensors have the name {name!r}")
        out[name] = tensor.detach()
    return out


def _walk(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise ValueError(f"the key {key!r} in {name or 'the dict'}: expected a string or an integer")
            yield from _walk(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _walk(f"{name}.{index}" if name else str(index), inner)
    elif not isinstance(value, _NO_TENSORS):
        raise ValueError(f"{name}: expected a tensor, a module, a dict or a list, got {type(value).__name__}")


def held_parts(name: str, tensor: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """Disjoint boxes of a tensor that this process has, none of them empty, and a view of its memory for each.

    Args:
        name: for error texts.
        tensor: a plain tensor is held whole; of a DTensor the shard of this process is, in several boxes where axes cut
            a dim from right to left (``_StridedShard``), in none outside the mesh.

    Raises:
        ValueError: a tensor on meta, sparse or of a quantized type; a DTensor with Partial placements, of a shard order
            that is not the usual one, or whose local tensor has not the shape that its placements give.
    """
    if isinstance(tensor, DTensor):
        return _shard_parts(name, tensor)
    _check_memory(name, tensor)
    box = tuple((0, extent) for extent in tensor.shape)
    return [(box, tensor)] if volume(box) else []


def _shard_parts(name: str, tensor: DTensor) -> list[tuple[Box, torch.Tensor]]:
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(
            f"tensor {name!r} is a DTensor of placements {tensor.placements}: its values are still to be added up; "
            "expected Shard or Replicate, so redistribute it first"
        )
    try:
        Spec.of(tensor).to_core()
    except ValueError as error:
        raise ValueError(f"tensor {name!r}: {error}") from None
    local = tensor.to_local().detach()
    _check_memory(name, local)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    ranges: list[_Ranges] = [[(0, extent)] for extent in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard | _StridedShard):
            factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
            count = tensor.device_mesh.size(axis)
            ranges[placement.dim] = _shard_of(ranges[placement.dim], factor, coordinate[axis], count)
    expected = tuple(sum(end - begin for begin, end in of_dim) for of_dim in ranges)
    if tuple(local.shape) != expected:
        raise ValueError(
            f"tensor {name!r} of shape {tuple(tensor.shape)} and placements {tensor.placements} has a local tensor of "
            f"shape {tuple(local.shape)} at mesh coordinate {tuple(coordinate)}, expected {expected}"
        )
    out = []
    for placed in itertools.product(*(_with_local_begin(of_dim) for of_dim in ranges)):
        box = tuple(global_range for global_range, _ in placed)
        view = local
        for dim, (size, (_, local_begin)) in enumerate(zip(extents(box), placed, strict=True)):
            view = view.narrow(dim, local_begin, size)
        if volume(box):
            out.append((box, view))
    return out


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided:
        raise ValueError(f"tensor {name!r} is of layout {tensor.layout}, expected a dense one (torch.strided)")
    if tensor.is_quantized:
        raise ValueError(f"tensor {name!r} is of {tensor.dtype}, with scales of its own: expected its int_repr()")
    if tensor.is_meta:
        raise ValueError(f"tensor {name!r} is on meta: it has no memory; expected weights that are there")


def _with_local_begin(ranges: _Ranges) -> list[tuple[tuple[int, int], int]]:
    begins = itertools.accumulate((end - begin for begin, end in ranges), initial=0)
    return list(zip(ranges, begins, strict=False))


def _shard_of(ranges: _Ranges, split_factor: int, index: int, count: int) -> _Ranges:
    """What one of ``count`` ranks has of indices that lie one behind the other in ``ranges``, neighbors joined."""
    out: _Ranges = []
    for outer in range(split_factor):
        for begin, end in _chunk_of(_chunk_of(ranges, outer, split_factor), index, count):
            if out and out[-1][1] == begin:
                out[-1] = (out[-1][0], end)
            else:
                out.append((begin, end))
    return out


def _chunk_of(ranges: _Ranges, index: int, count: int) -> _Ranges:
    """torch.chunk's rule: the rounded-up share, the last ones smaller or empty."""
    total = sum(end - begin for begin, end in ranges)
    size = -(-total // count)
    first, last = index * size, min((index + 1) * size, total)
    out: _Ranges = []
    seen = 0
    for begin, end in ranges:
        cut = (max(begin, begin + first - seen), min(end, begin + last - seen))
        if cut[0] < cut[1]:
            out.append(cut)
        seen += end - begin
    return out
