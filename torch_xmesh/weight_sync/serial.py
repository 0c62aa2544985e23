"""A map applied in one process, to whole tensors: to try it without a cluster, and to compare with."""

from collections.abc import Callable, Mapping, Sequence

import torch

from torch_xmesh.arguments import shown
from torch_xmesh.weight_sync.boxes import slices
from torch_xmesh.weight_sync.region import Region, TargetRegions

Loader = Callable[[Region, torch.Tensor], None]


def apply_map(
    sources: Mapping[str, torch.Tensor], resolved: Sequence[TargetRegions], loader: Loader | None = None
) -> None:
    """Fills targets from whole source tensors.

    Args:
        sources: the whole (global) tensors, by the names that the catalog has.
        resolved: what :func:`resolve` returned; the memory of its views is written.
        loader: called as ``loader(region, tensor)`` for each staged region, after all others are filled. ``tensor`` has
            the extents of the region's box and the type under way.

    Raises:
        ValueError: a source that is missing or is no tensor, a staged region without a loader.
    """
    if not isinstance(sources, Mapping) or not all(isinstance(each, torch.Tensor) for each in sources.values()):
        raise ValueError(f"sources must be a dict of tensors, got {shown(sources)}")
    if not isinstance(resolved, list | tuple) or not all(isinstance(each, TargetRegions) for each in resolved):
        raise ValueError(f"resolved must be what resolve() returned, got {shown(resolved)}")
    staged = []
    for target in resolved:
        for fill in target.fills:
            fill.into.fill_(fill.value)
        for region in target.regions:
            if region.source not in sources:
                raise ValueError(f"target {target.name!r} needs the source {region.source!r}, which is not given")
            if region.staged:
                staged.append(region)
            else:
                _fill(region, sources[region.source])
    for region in staged:
        if loader is None:
            raise ValueError(f"{region.source!r} is staged: expected a loader for it")
        loader(region, _under_way(region, sources[region.source]))


def _under_way(region: Region, source: torch.Tensor) -> torch.Tensor:
    return source.detach()[slices(region.ranges)].to(region.dtype, copy=True)


def _fill(region: Region, source: torch.Tensor) -> None:
    into, received = region.into, _under_way(region, source)
    if into is None:
        return
    if region.hook is None:
        into.copy_(received)
    else:
        region.hook(received, into, region.ranges)
