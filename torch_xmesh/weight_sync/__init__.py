"""Which part of which source tensor goes where in a target's tensors: the map of a weight sync.

Source processes say what they have in manifests, whose texts make a catalog. A target process resolves its own tensors
against it. Here both are one process, and the map is tried on whole tensors; rank 1 of 2 has its heads of a fused
projection, and its rows of a padded vocabulary:

    >>> trained = {"q": torch.randn(8, 4), "k": torch.randn(4, 4), "v": torch.randn(4, 4)}
    >>> trained["embedding"] = torch.randn(5, 4)
    >>> catalog = Catalog.merge({0: Manifest.from_json(Manifest.of(trained).to_json())})
    >>> served = {"qkv": torch.empty(8, 4, dtype=torch.bfloat16), "embedding": torch.empty(4, 4)}
    >>> mapping = {
    ...     "qkv": concat([take(name).shard(0, 1, 2) for name in ("q", "k", "v")]),
    ...     "embedding": take("embedding").pad(0, 8).shard(0, 1, 2),
    ... }
    >>> resolved = resolve(served, mapping, catalog)
    >>> [(region.source, region.ranges) for region in resolved[1].regions]
    [('q', ((4, 8), (0, 4))), ('k', ((2, 4), (0, 4))), ('v', ((2, 4), (0, 4)))]
    >>> apply_map(trained, resolved)
    >>> bool((served["embedding"][0] == trained["embedding"][4]).all()), served["embedding"][1:].count_nonzero().item()
    (True, 0)

``hugging_face.fused_map`` has such maps ready.
"""

from torch_xmesh.weight_sync.expression import Expression, Renaming, concat, rename, stack, take
from torch_xmesh.weight_sync.manifest import Catalog, CatalogTensor, HeldTensor, Manifest, OwnedBox
from torch_xmesh.weight_sync.region import Fill, Region, TargetRegions
from torch_xmesh.weight_sync.resolving import resolve
from torch_xmesh.weight_sync.serial import apply_map

__all__ = [
    "Catalog",
    "CatalogTensor",
    "Expression",
    "Fill",
    "HeldTensor",
    "Manifest",
    "OwnedBox",
    "Region",
    "Renaming",
    "TargetRegions",
    "apply_map",
    "concat",
    "rename",
    "resolve",
    "stack",
    "take",
]
