"""From targets, a map and the sources' catalog to regions: every element of every target exactly once."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_xmesh.arguments import instance_of, shown
from torch_xmesh.weight_sync.boxes import Box, box_text, extents, intersection, normal_box, volume
from torch_xmesh.weight_sync.coverage import Claim, check_apart, check_coverage
from torch_xmesh.weight_sync.expression import Expression, Renaming, rename, take
from torch_xmesh.weight_sync.held import held_parts, named_tensors
from torch_xmesh.weight_sync.layout import Layout, Piece
from torch_xmesh.weight_sync.manifest import Catalog, CatalogTensor
from torch_xmesh.weight_sync.memory import memory_key
from torch_xmesh.weight_sync.mistakes import Mistakes
from torch_xmesh.weight_sync.region import Fill, Region, TargetRegions, cast_mistake, dtype_under_way

Entry = Expression | Region | Sequence[Region]


def resolve(
    targets: Any,
    mapping: Mapping[str, Entry],
    catalog: Catalog,
    *,
    renaming: Renaming | Mapping[str, str] | None = None,
) -> list[TargetRegions]:
    """What fills this process's part of each target tensor.

    Args:
        targets: an ``nn.Module``, or nested dicts and lists of tensors, named as in a ``state_dict``. Of a DTensor the
            shard of this process is filled. Targets that are the same memory (tied weights) are filled once.
        mapping: by target name an expression for the whole (global) target, or regions whose views are this process's
            memory. A target without an entry takes the source of its name. Under a name that is no target's there may
            be staged regions; where a target has staged regions only, its loader is to fill it.
        catalog: what the sources have.
        renaming: rules that make source names of target names, where there is no entry.

    Returns:
        one entry per target and per name of staged regions, sorted by name.

    Raises:
        ValueError: one that says all that is wrong: elements of targets that nothing fills or that two fill, other
            shapes, names that do not exist, boxes that nobody holds or outside their tensors, types that are not
            cast.
    """
    if not isinstance(mapping, Mapping):
        raise ValueError(f"mapping must be a dict of expressions and regions, got {shown(mapping)}")
    instance_of("catalog", catalog, Catalog, "a Catalog")
    rules = renaming if isinstance(renaming, Renaming) else rename({} if renaming is None else renaming)
    return _Resolver(mapping, catalog, rules).run(named_tensors(targets))


@dataclasses.dataclass(frozen=True)
class _Filling:
    """One target and what fills it. ``is_right``: whether nothing is wrong with its regions."""

    name: str
    regions: tuple[Region, ...] = ()
    fills: tuple[Fill, ...] = ()
    is_right: bool = False


class _Resolver:
    def __init__(self, mapping: Mapping[str, Entry], catalog: Catalog, renaming: Renaming) -> None:
        self._mapping = mapping
        self._catalog = catalog
        self._renaming = renaming
        self._mistakes = Mistakes()

    def run(self, targets: dict[str, torch.Tensor]) -> list[TargetRegions]:
        out = [self._staged(name, entry, targets) for name, entry in self._mapping.items() if name not in targets]
        groups: dict[tuple[object, ...], list[str]] = {}
        for name in sorted(targets):
            groups.setdefault(self._memory(name, targets[name]), []).append(name)
        apart = []
        for names in groups.values():
            fillings = self._group(names, targets)
            first = fillings[0]
            if all(filling.is_right for filling in fillings):
                apart.append((first.name, _local(targets[first.name])))
            out.append(TargetRegions(first.name, first.regions, first.fills))
            out += [TargetRegions(name, (), same_as=first.name) for name in names if name != first.name]
        check_apart(apart, self._mistakes)
        self._mistakes.raise_if_any()
        return sorted(out, key=lambda entry: entry.name)

    def _memory(self, name: str, target: torch.Tensor) -> tuple[object, ...]:
        local = _local(target)
        if local.is_meta or local.layout != torch.strided or local.numel() == 0:
            return (name,)
        if isinstance(target, DTensor):
            return (target.shape, target.placements, *memory_key(local))
        return (target.shape, None, *memory_key(local))

    def _group(self, names: list[str], targets: dict[str, torch.Tensor]) -> list[_Filling]:
        """What fills targets that are the same memory: those of them that name a source, at least one."""
        named = [name for name in names if name in self._mapping or self._default(name) in self._catalog.tensors]
        fillings = [self._filling(name, targets[name]) for name in named or names[:1]]
        first = fillings[0]
        for other in fillings[1:]:
            if first.is_right and other.is_right and self._written(first) != self._written(other):
                self._mistakes.add(
                    f"targets {first.name!r} and {other.name!r} are the same memory (tied), but are filled "
                    f"differently, by {_sources(first)} and by {_sources(other)}"
                )
        return fillings

    def _written(self, filling: _Filling) -> set[tuple[object, ...]]:
        """What is written where, with one name for sources that are tied."""
        out: set[tuple[object, ...]] = {(fill.value, *memory_key(fill.into)) for fill in filling.fills}
        for region in filling.regions:
            if region.into is not None:
                source = self._catalog.memory_of(region.source)
                out.add((source, region.ranges, region.dtype, region.hook, *memory_key(region.into)))
        return out

    def _default(self, name: str) -> str:
        try:
            return self._renaming(name)
        except ValueError as error:
            self._mistakes.add(f"target {name!r}: {error}")
            return name

    def _filling(self, name: str, target: torch.Tensor) -> _Filling:
        """The regions of one target, checked for coverage unless a loader fills it."""
        entry = self._mapping[name] if name in self._mapping else take(self._default(name))
        try:
            parts = held_parts(name, target)
        except ValueError as error:
            self._mistakes.add(f"target {error}")
            return _Filling(name)
        what = f"target {name!r}"
        fills: list[Fill] = []
        if isinstance(entry, Expression):
            layout = self._layout(what, entry, tuple(target.shape))
            if layout is None:
                return _Filling(name)
            given, fills = self._placed(what, target.dtype, layout, parts)
        else:
            given = _regions(what, entry)
        checked = [region for each in given if (region := self._checked(what, each)) is not None]
        claims = [Claim(self._label(each), each.into) for each in given if each.into is not None and each.into.numel()]
        claims += [Claim(f"the value {fill.value}", fill.into) for fill in fills]
        where = f"the local shard of {what}" if isinstance(target, DTensor) else what
        if not given or not all(region.staged for region in given):
            check_coverage(where, _local(target), claims, self._mistakes)
        regions = tuple(region for region in checked if volume(region.ranges))
        return _Filling(name, regions, tuple(fills), is_right=len(checked) == len(given))

    def _layout(self, what: str, entry: Expression, shape: tuple[int, ...]) -> Layout | None:
        known = self._catalog.tensors
        missing = sorted(source for source in entry.names() if source not in known)
        for source in missing:
            self._no_source(what, source)
        if missing:
            return None
        try:
            layout = entry.layout(lambda source: known[source].shape)
        except ValueError as error:
            self._mistakes.add(f"{what}: {error}")
            return None
        if layout.shape != shape:
            self._mistakes.add(f"{what} has shape {shape}, but what fills it ({_among(entry.names())}) {layout.shape}")
            return None
        return layout

    def _placed(
        self, what: str, dtype: torch.dtype, layout: Layout, parts: Sequence[tuple[Box, torch.Tensor]]
    ) -> tuple[list[Region], list[Fill]]:
        """Regions and fills of this process's parts of a target: a box of it and its memory each."""
        regions, fills = [], []
        for box, memory in parts:
            for piece in layout.within(box):
                view = memory
                for dim, ((begin, end), (origin, _)) in enumerate(zip(piece.box, box, strict=True)):
                    view = view.narrow(dim, begin - origin, end - begin)
                if piece.source is None:
                    self._check_value(what, piece, dtype)
                    fills.append(Fill(view, piece.value))
                    continue
                into = piece.view_of(view)
                regions.append(
                    Region(piece.source, piece.source_box(), into, piece.dtype, hook=piece.hook, block=piece.block)
                )
        return regions, fills

    def _checked(self, what: str, region: Region) -> Region | None:
        """The region with its box and dtype in normal form; None where something is wrong with it."""
        source = self._catalog.tensors.get(region.source)
        if source is None:
            self._no_source(what, region.source)
            return None
        try:
            box = normal_box(region.box, source.shape)
        except ValueError as error:
            self._mistakes.add(f"{what}: source {region.source!r}: {error}")
            return None
        lines = [*_unheld(what, region.source, box, source), *_misfits(what, region, box, source)]
        for line in lines:
            self._mistakes.add(line)
        into = None if region.into is None else region.into.detach()
        return None if lines else dataclasses.replace(region, box=box, into=into, dtype=_dtype(region, source))

    def _staged(self, name: str, entry: Entry, targets: dict[str, torch.Tensor]) -> TargetRegions:
        given = [] if isinstance(entry, Expression) else _regions(f"entry {name!r}", entry)
        if not given or not all(region.staged for region in given):
            self._mistakes.add(f"the map has an entry {name!r}, but there is no such target{_closest(name, targets)}")
            return TargetRegions(name, ())
        checked = [self._checked(f"entry {name!r}", region) for region in given]
        return TargetRegions(name, tuple(region for region in checked if region is not None))

    def _no_source(self, what: str, source: str) -> None:
        closest = _closest(source, self._catalog.tensors) if self._mistakes.has_room else ""
        self._mistakes.add(f"{what}: there is no source {source!r}{closest}")

    def _label(self, region: Region) -> str:
        """The region's source and box for a line; the name alone where the box is wrong."""
        source = self._catalog.tensors.get(region.source)
        try:
            box = "" if source is None else f" {box_text(normal_box(region.box, source.shape))}"
        except ValueError:
            box = ""
        return f"{region.source!r}{box}"

    def _check_value(self, what: str, piece: Piece, dtype: torch.dtype) -> None:
        of_value = torch.tensor(piece.value).dtype
        if not torch.can_cast(of_value, dtype):
            self._mistakes.add(f"{what} is of {dtype}: it cannot be padded with the value {piece.value}")


def _misfits(what: str, region: Region, box: Box, source: CatalogTensor) -> list[str]:
    """What is wrong with a region's view, type or block, for this box of the source."""
    out = []
    if region.block is not None and len(region.block) != len(box):
        out.append(f"{what}: source {region.source!r} has {len(box)} dims, but block={region.block}")
    if region.into is not None and tuple(region.into.shape) != extents(box):
        out.append(
            f"{what}: the view for {region.source!r} {box_text(box)} has shape {tuple(region.into.shape)}, "
            f"expected {extents(box)}"
        )
    under_way = _dtype(region, source)
    arrives_as = under_way if region.into is None or region.hook is not None else region.into.dtype
    wrong = cast_mistake(source.dtype, under_way, arrives_as, is_asked_for=region.dtype is not None)
    return out if wrong is None else [*out, f"{what}: source {region.source!r}: {wrong}"]


def _unheld(what: str, name: str, box: Box, source: CatalogTensor) -> list[str]:
    missing = (intersection(box, unheld) for unheld in source.unheld)
    return [f"{what} needs {name!r} {box_text(part)}, which nobody holds" for part in missing if part is not None]


def _dtype(region: Region, source: CatalogTensor) -> torch.dtype:
    if region.dtype is not None:
        return region.dtype
    if region.into is None or region.hook is not None:
        return source.dtype
    return dtype_under_way(source.dtype, region.into.dtype)


def _regions(what: str, entry: Region | Sequence[Region]) -> list[Region]:
    regions = [entry] if isinstance(entry, Region) else list(entry) if isinstance(entry, list | tuple) else None
    if regions is None or not all(isinstance(region, Region) for region in regions):
        raise ValueError(f"{what}: expected an expression, a region or a list of regions, got {shown(entry)}")
    return regions


def _local(target: torch.Tensor) -> torch.Tensor:
    return target.to_local().detach() if isinstance(target, DTensor) else target


def _sources(filling: _Filling) -> str:
    return _among({region.source for region in filling.regions})


def _among(names: Iterable[str]) -> str:
    in_order = sorted(names)
    more = f" and {len(in_order) - 3} more" if len(in_order) > 3 else ""
    return ", ".join(map(repr, in_order[:3])) + more


def _closest(name: str, names: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, names, n=3)
    return f"; the closest {'is' if len(found) == 1 else 'are'} {', '.join(map(repr, found))}" if found else ""
