"""A batch cut into microbatches, and outputs merged again; specs are those of ``torch.distributed.pipelining``."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.cut.chunk_specs import Chunk, Fold, Stack, Whole, own_spec

__all__ = [
    "Microbatch",
    "batch_size",
    "common_size",
    "leaf_specs",
    "loss_weights",
    "merge_outputs",
    "microbatch_sizes",
    "output_specs",
    "shard_sizes",
    "split_microbatches",
    "split_tree",
]


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """One microbatch: its arguments, its target (None where there is none) and how many samples it holds."""

    index: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    num_samples: int


def microbatch_sizes(num_samples: int, num_microbatches: int) -> list[int]:
    """Samples per microbatch by ``torch.tensor_split``'s rule: the first ``num_samples % num_microbatches`` have one
    more.

    Raises:
        ValueError: no microbatch, or fewer samples than microbatches.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches must be at least 1, got {num_microbatches}")
    if num_samples < num_microbatches:
        raise ValueError(
            f"a batch of {num_samples} samples cannot be split into {num_microbatches} microbatches: "
            f"pass at least {num_microbatches} samples or lower num_microbatches"
        )
    size, rest = divmod(num_samples, num_microbatches)
    return [size + (index < rest) for index in range(num_microbatches)]


def shard_sizes(num_samples: int, num_shards: int) -> list[int]:
    """Samples per data shard by DTensor's rule: chunks of the rounded-up share, the last ones smaller or empty."""
    size = -(-num_samples // num_shards)
    return [min(max(num_samples - shard * size, 0), size) for shard in range(num_shards)]


def loss_weights(sizes: Sequence[int], scale_grads: bool = True) -> list[float]:
    """The weight of each part's loss: n_i / N, so that the sum is the batch's mean, or 1 without scaling."""
    total = sum(sizes)
    return [size / total if scale_grads else 1.0 for size in sizes]


def leaf_specs(tree: Any, spec: Any, what: str) -> list[Any]:
    """One chunk spec per leaf of `tree`: a Chunk for tensors to cut, a Whole for all else.

    Args:
        tree: arguments, any pytree.
        spec: None (tensors are cut along dim 0), one spec for all tensors of `tree`, or a dict, tuple or list of such
            specs, as `tree` is.
        what: how messages call `tree`.

    Raises:
        ValueError: the structures differ, or something is no spec.
    """
    if spec is None:
        return [Chunk(0) if _is_cuttable(leaf) else Whole() for leaf in pytree.tree_leaves(tree)]
    own = own_spec(spec)
    if own is not None:
        leaves, structure = pytree.tree_flatten(tree)
        if isinstance(own, Chunk) and structure.is_leaf() and not _is_cuttable(tree):
            raise ValueError(
                f"{spec} in the chunk spec of {what} needs a tensor with dimensions, got {_describe(tree)}"
            )
        return [own if _is_cuttable(leaf) or not isinstance(own, Chunk) else Whole() for leaf in leaves]
    if isinstance(tree, dict) and isinstance(spec, dict):
        if unknown := sorted(set(spec) - set(tree), key=str):
            raise ValueError(f"the chunk spec of {what} names {unknown}, but {what} has {sorted(tree, key=str)}")
        return [
            leaf_spec for key, part in tree.items() for leaf_spec in leaf_specs(part, spec.get(key), f"{what}[{key!r}]")
        ]
    if isinstance(tree, tuple | list) and isinstance(spec, tuple | list):
        if len(tree) != len(spec):
            raise ValueError(f"the chunk spec of {what} has {len(spec)} entries, {what} has {len(tree)}")
        parts = zip(tree, spec, strict=True)
        return [
            leaf_spec
            for index, (part, one_spec) in enumerate(parts)
            for leaf_spec in leaf_specs(part, one_spec, f"{what}[{index}]")
        ]
    raise ValueError(
        f"a chunk spec of {what} is a TensorChunkSpec, a Replicate, None or a structure like {what}'s, got {spec!r}"
    )


def batch_size(
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
) -> int | None:
    """The number of samples in the arguments: what every tensor to cut has along its chunk dim; None if there is none
    to cut.

    Raises:
        ValueError: two tensors disagree.
    """
    tree, specs = _arguments(tuple(args), dict(kwargs or {}), args_chunk_spec, kwargs_chunk_spec)
    return common_size(tree, specs, "argument")


def split_tree(tree: Any, specs: list[Any], sizes: Sequence[int], what: str) -> list[Any]:
    """`tree` cut into ``len(sizes)`` trees of its structure, leaf i by ``specs[i]``: views of the tensors."""
    leaves, structure = pytree.tree_flatten(tree)
    columns = []
    for leaf, spec in zip(leaves, specs, strict=True):
        if isinstance(spec, Chunk):
            found = leaf.size(spec.split_dim)
            if found != sum(sizes):
                raise ValueError(
                    f"{what} has {found} samples along dim {spec.split_dim}, expected {sum(sizes)} ({_describe(leaf)})"
                )
            columns.append(list(torch.split(leaf, list(sizes), spec.split_dim)))
        else:
            columns.append([leaf] * len(sizes))
    return [pytree.tree_unflatten([column[index] for column in columns], structure) for index in range(len(sizes))]


def split_microbatches(
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    target: Any = None,
    *,
    num_microbatches: int,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
    target_chunk_spec: Any = None,
) -> list[Microbatch]:
    """The batch as `num_microbatches` microbatches, cut by ``torch.tensor_split``'s rule (sizes differ by at most one).

    Tensors without a chunk spec are cut along dim 0; everything that is no tensor, a 0-dim tensor, and what its spec
    says to replicate goes whole to every microbatch.

    Raises:
        ValueError: nothing to cut, tensors with different numbers of samples, fewer samples than microbatches, a spec
            that does not match.
    """
    args, kwargs = tuple(args), dict(kwargs or {})
    tree, specs = _arguments(args, kwargs, args_chunk_spec, kwargs_chunk_spec)
    target_specs = leaf_specs(target, target_chunk_spec, "target")
    samples = common_size(tree, specs, "argument")
    target_samples = common_size(target, target_specs, "target")
    if samples is not None and target_samples is not None and samples != target_samples:
        raise ValueError(f"the target has {target_samples} samples, the arguments have {samples}")
    samples = target_samples if samples is None else samples
    if samples is None:
        raise ValueError("the batch has no tensor to cut into microbatches: every argument is constant or replicated")
    sizes = microbatch_sizes(samples, num_microbatches)
    cut = split_tree(tree, specs, sizes, "an argument")
    targets = split_tree(target, target_specs, sizes, "the target")
    return [Microbatch(i, cut[i][0], cut[i][1], targets[i], sizes[i]) for i in range(num_microbatches)]


def merge_outputs(outputs: Sequence[Any], merge_spec: Any = None) -> Any:
    """Outputs of all microbatches as one: tensors concatenated along dim 0 or where `merge_spec` says.

    Args:
        outputs: one pytree per microbatch, all of the same structure.
        merge_spec: None, or a prefix tree of TensorChunkSpec, torch's reducers (``sum_reducer``), Replicate (all are
            equal: the first is taken). None concatenates along dim 0; of tensors without dims, such as losses, it makes
            one with an entry for each.

    Raises:
        ValueError: structures differ, or `merge_spec` would concatenate 0-dim tensors.
    """
    flat = [pytree.tree_flatten(output) for output in outputs]
    structure = flat[0][1]
    for index, (_, other) in enumerate(flat):
        if other != structure:
            raise ValueError(f"microbatch {index}'s output has the structure {other}, microbatch 0's has {structure}")
    specs = output_specs(outputs[0], merge_spec)
    merged = [_merge_leaf([leaves[index] for leaves, _ in flat], spec) for index, spec in enumerate(specs)]
    return pytree.tree_unflatten(merged, structure)


def output_specs(output: Any, merge_spec: Any) -> list[Any]:
    """How `merge_outputs` merges each leaf of an output."""
    if merge_spec is None:
        leaves = pytree.tree_leaves(output)
        return [_usual_merge(leaf) for leaf in leaves]
    return leaf_specs(output, merge_spec, "output")


def _usual_merge(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return Whole()
    return Chunk(0) if leaf.dim() > 0 else Stack()


def _merge_leaf(parts: list[Any], spec: Any) -> Any:
    if isinstance(spec, Stack):
        return torch.stack(parts)
    if isinstance(spec, Chunk):
        return parts[0] if len(parts) == 1 else torch.cat(parts, spec.split_dim)
    if isinstance(spec, Fold):
        value = spec.init_value
        for part in parts:
            value = spec.reduce_fn(value, part)
        return value
    return parts[0]


def _arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], args_spec: Any, kwargs_spec: Any
) -> tuple[Any, list[Any]]:
    specs = leaf_specs(args, args_spec, "args") + leaf_specs(kwargs, kwargs_spec, "kwargs")
    return (args, kwargs), specs


def common_size(tree: Any, specs: Sequence[Any], what: str) -> int | None:
    """What all leaves of `tree` to cut have along their chunk dims, leaf i by ``specs[i]``; None if none is to cut.

    Raises:
        ValueError: two leaves disagree.
    """
    cut = [
        (leaf, spec.split_dim)
        for leaf, spec in zip(pytree.tree_leaves(tree), specs, strict=True)
        if isinstance(spec, Chunk)
    ]
    if all(-leaf.dim() <= dim < leaf.dim() for leaf, dim in cut):
        sizes = {leaf.size(dim) for leaf, dim in cut}
        if len(sizes) <= 1:
            return next(iter(sizes), None)
    return _named_common_size(tree, specs, what)


def _named_common_size(tree: Any, specs: Sequence[Any], what: str) -> int | None:
    """As `common_size`, with the names of the leaves: for the messages."""
    found: dict[int, str] = {}
    for (path, leaf), spec in zip(pytree.tree_flatten_with_path(tree)[0], specs, strict=True):
        if isinstance(spec, Chunk):
            if not -leaf.dim() <= spec.split_dim < leaf.dim():
                raise ValueError(
                    f"{what} {pytree.keystr(path)} of shape {tuple(leaf.shape)} has no dim {spec.split_dim} to cut"
                )
            found.setdefault(leaf.size(spec.split_dim), f"{what} {pytree.keystr(path)}, dim {spec.split_dim}")
    if len(found) > 1:
        sizes = "; ".join(f"{size} in {where}" for size, where in found.items())
        raise ValueError(
            f"the batch's tensors disagree on the number of samples: {sizes}; name the batch dim by a chunk spec, "
            "or replicate it"
        )
    return next(iter(found), None)


def _is_cuttable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _describe(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"a {leaf.dtype} tensor of shape {tuple(leaf.shape)}"
    return f"{type(leaf).__name__} {leaf!r}"
