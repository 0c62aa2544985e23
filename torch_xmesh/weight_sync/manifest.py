"""Who has which boxes of which tensors: a process's manifest, and the catalog that the manifests of all make."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_xmesh.arguments import instance_of, shown
from torch_xmesh.weight_sync.boxes import Box, whole_box, without
from torch_xmesh.weight_sync.held import held_parts, named_tensors
from torch_xmesh.weight_sync.memory import memory_key

_VERSION = 1


@dataclasses.dataclass(frozen=True)
class HeldTensor:
    """What one process has of a tensor.

    Attributes:
        shape: of the whole tensor.
        dtype: of its elements.
        boxes: disjoint boxes that are held, none of them empty.
        same_as: of tensors that are the same memory (tied weights) the first one's name, in alphabetical order; None
            for that one itself, and where there is no other.
        views: the memory of each box; none in a manifest that was read from text.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    same_as: str | None = None
    views: tuple[torch.Tensor, ...] = dataclasses.field(default=(), compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What one source process has, by the tensors' names. Manifests are equal where their texts are."""

    tensors: Mapping[str, HeldTensor]

    @classmethod
    def of(cls, weights: Any) -> "Manifest":
        """Of an ``nn.Module`` or of nested dicts and lists of tensors, named as in a ``state_dict``.

        A plain tensor is held whole, of a DTensor the shard of this process is. The views share its memory.

        Raises:
            ValueError: a DTensor of Partial placements, a tensor on meta, something that is no tensor.
        """
        tensors = {}
        first_of: dict[tuple[object, ...], str] = {}
        for name, tensor in sorted(named_tensors(weights).items()):
            parts = held_parts(name, tensor)
            boxes, views = tuple(box for box, _ in parts), tuple(view for _, view in parts)
            memory = (tuple(tensor.shape), boxes, *map(memory_key, views))
            first = first_of.setdefault(memory, name) if views else name
            same_as = None if first == name else first
            tensors[name] = HeldTensor(tuple(tensor.shape), tensor.dtype, boxes, same_as, views)
        return cls(tensors)

    def to_json(self) -> str:
        """As text for other processes: all but the views."""
        tensors = {
            name: {
                "shape": held.shape,
                "dtype": str(held.dtype).removeprefix("torch."),
                "boxes": held.boxes,
                "same_as": held.same_as,
            }
            for name, held in self.tensors.items()
        }
        return json.dumps({"version": _VERSION, "tensors": tensors}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """From another process's text, without views.

        Raises:
            ValueError: text that is no manifest of this version; it names the field and what is there.
        """
        try:
            whole = json.loads(instance_of("text", text, str, "a string"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a manifest is JSON, but: {error}") from None
        if not isinstance(whole, dict) or whole.get("version") != _VERSION:
            found = whole.get("version") if isinstance(whole, dict) else whole
            raise ValueError(f"a manifest has version {_VERSION}, got {found!r}")
        if not isinstance(whole.get("tensors"), dict):
            raise ValueError(f"a manifest has a dict of tensors, got {whole.get('tensors')!r}")
        return cls({name: _held_from_json(name, entry) for name, entry in whole["tensors"].items()})


@dataclasses.dataclass(frozen=True)
class OwnedBox:
    """A box of a tensor, and the members that have it, ascending."""

    box: Box
    members: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class CatalogTensor:
    """What all members together have of a tensor.

    Attributes:
        shape: of the whole tensor.
        dtype: of its elements.
        owned: boxes with the members that have them. Boxes of different members may overlap, and leave gaps.
        same_as: the name of a tensor that is the same memory on all members that have a part; None if there is none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    owned: tuple[OwnedBox, ...]
    same_as: str | None = None

    @functools.cached_property
    def unheld(self) -> tuple[Box, ...]:
        """Disjoint boxes that no member has, none of them empty."""
        return _boxes_between(self.shape, [owned.box for owned in self.owned])


@dataclasses.dataclass(frozen=True)
class Catalog:
    """What all source processes have, by the tensors' names, which are sorted."""

    tensors: Mapping[str, CatalogTensor]

    @classmethod
    def merge(cls, manifests: Mapping[int, Manifest]) -> "Catalog":
        """Of one manifest per member.

        Args:
            manifests: by member id. A member need not have a part of every tensor, nor know of every one.

        Raises:
            ValueError: two members that disagree on a tensor's shape or dtype.
        """
        if not isinstance(manifests, Mapping):
            raise ValueError(f"manifests must be a dict of manifests by member id, got {shown(manifests)}")
        for member, manifest in manifests.items():
            if not isinstance(member, int) or not isinstance(manifest, Manifest):
                raise ValueError(f"manifests has {shown(manifest)} for {member!r}, expected a Manifest for an int")
        first: dict[str, tuple[int, HeldTensor]] = {}
        members: dict[str, dict[Box, list[int]]] = {}
        ties: dict[str, set[str | None]] = {}
        for member in sorted(manifests):
            for name, held in manifests[member].tensors.items():
                of, known = first.setdefault(name, (member, held))
                if (known.shape, known.dtype) != (held.shape, held.dtype):
                    raise ValueError(_disagreement(name, of, known, member, held))
                if held.boxes:
                    ties.setdefault(name, set()).add(held.same_as)
                boxes = members.setdefault(name, {})
                for box in held.boxes:
                    boxes.setdefault(box, []).append(member)
        return cls(
            {
                name: CatalogTensor(
                    first[name][1].shape,
                    first[name][1].dtype,
                    tuple(OwnedBox(box, tuple(ids)) for box, ids in sorted(members[name].items())),
                    next(iter(ties[name])) if len(ties.get(name, ())) == 1 else None,
                )
                for name in sorted(first)
            }
        )

    def memory_of(self, name: str) -> str:
        """The name that stands for a tensor's memory: another one's for a tied tensor, else its own."""
        return self.tensors[name].same_as or name

    @classmethod
    def of(cls, weights: Any) -> "Catalog":
        """Of one process's tensors alone, as member 0: to try a map. ValueError as :meth:`Manifest.of`."""
        return cls.merge({0: Manifest.of(weights)})


def _disagreement(name: str, member: int, held: HeldTensor, other: int, other_held: HeldTensor) -> str:
    what = "dtype" if held.shape == other_held.shape else "shape"
    one, another = getattr(held, what), getattr(other_held, what)
    return f"tensor {name!r} has {what} {one} at member {member}, but {another} at member {other}"


def _held_from_json(name: str, entry: Any) -> HeldTensor:
    where = f"tensor {name!r} of a manifest"
    if not isinstance(entry, dict) or set(entry) != {"shape", "dtype", "boxes", "same_as"}:
        raise ValueError(f"{where}: expected shape, dtype, boxes and same_as, got {entry!r}")
    shape, boxes = entry["shape"], entry["boxes"]
    if not isinstance(shape, list) or not all(type(extent) is int and extent >= 0 for extent in shape):
        raise ValueError(f"{where}: expected a shape of integers that are not negative, got {shape!r}")
    dtype = getattr(torch, entry["dtype"], None) if isinstance(entry["dtype"], str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{where}: expected a dtype of torch, got {entry['dtype']!r}")
    if not isinstance(boxes, list):
        raise ValueError(f"{where}: expected a list of boxes, got {boxes!r}")
    if not isinstance(entry["same_as"], str | None):
        raise ValueError(f"{where}: expected the name of a tied tensor or null, got {entry['same_as']!r}")
    read = tuple(_box_from_json(where, box, shape) for box in boxes)
    return HeldTensor(tuple(shape), dtype, read, entry["same_as"])


def _box_from_json(where: str, box: Any, shape: list[int]) -> Box:
    if not isinstance(box, list) or not all(
        isinstance(of_dim, list) and len(of_dim) == 2 and type(of_dim[0]) is type(of_dim[1]) is int for of_dim in box
    ):
        raise ValueError(f"{where}: expected a box of one [begin, end] per dim, got {box!r}")
    if len(box) != len(shape) or not all(
        0 <= begin < end <= extent for (begin, end), extent in zip(box, shape, strict=True)
    ):
        raise ValueError(f"{where}: expected a box with elements, inside the shape {tuple(shape)}, got {box!r}")
    return tuple((begin, end) for begin, end in box)


def _boxes_between(shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[Box, ...]:
    """The elements of a tensor that are in none of these distinct boxes, as disjoint boxes."""
    ranges = [sorted({box[dim] for box in boxes}) for dim in range(len(shape))]
    is_grid = len(boxes) == math.prod(map(len, ranges)) and all(
        [0, *(end for _, end in of_dim)] == [*(begin for begin, _ in of_dim), extent]
        for of_dim, extent in zip(ranges, shape, strict=True)
    )
    rest = [] if is_grid or not math.prod(shape) else [whole_box(shape)]
    for box in boxes:
        rest = without(rest, box)
    return tuple(rest)
