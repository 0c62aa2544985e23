"""The oracle of a pipeline step: the same microbatches and data shards, one after another in one process."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torch_xmesh.pipeline.cut.losses import loss_of
from torch_xmesh.pipeline.cut.microbatch import (
    Microbatch,
    leaf_specs,
    loss_weights,
    merge_outputs,
    shard_sizes,
    split_microbatches,
    split_tree,
)
from torch_xmesh.pipeline.cut.partition import Partition
from torch_xmesh.pipeline.state.seeds import dropout_rng, dropout_seed

__all__ = ["SerialResult", "serial_step"]


@dataclasses.dataclass(frozen=True)
class SerialResult:
    """What :func:`serial_step` gives.

    Attributes:
        losses: the loss of each microbatch, a detached scalar.
        loss: the loss of the step, a scalar.
        output: the merged output of the whole batch; None if not asked for.
    """

    losses: list[torch.Tensor]
    loss: torch.Tensor
    output: Any


@dataclasses.dataclass(frozen=True)
class _Plan:
    model: nn.Module
    loss_fn: Callable[[Any, Any], torch.Tensor]
    partition: Partition | None
    scale_grads: bool
    seed: int
    step: int
    backward: bool


def serial_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Any = None,
    loss_fn: Callable[..., torch.Tensor],
    num_microbatches: int,
    num_data_shards: int | Sequence[int] = 1,
    scale_grads: bool = True,
    partition: Partition | None = None,
    seed: int = 0,
    step: int = 0,
    shard_first: bool = False,
    return_outputs: bool = True,
    backward: bool = True,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
    target_chunk_spec: Any = None,
    output_merge_spec: Any = None,
) -> SerialResult:
    """One training step as a pipeline takes it: the loss is sum_i w_i loss_fn(model(x_i), y_i), gradients accumulate
    in ``.grad``.

    i runs over microbatches and, within each, data shards; w_i is samples of the part over samples of the batch
    (`scale_grads`), or 1. Each data shard accumulates its microbatches in order, then the shards' gradients are
    summed in order. Buffers end as data shard 0 leaves them.

    Args:
        model: the whole model; ``.grad`` of its parameters gets the gradients.
        args, kwargs, target: the whole batch; cut by ``torch.tensor_split`` into microbatches, each by DTensor's rule
            into data shards.
        loss_fn: a mean over its samples (or a sum, with ``scale_grads=False``).
        num_microbatches: into how many parts the batch is cut.
        num_data_shards: data shards of every stage's mesh; or one number per stage of `partition`, of which the last
            says over how many the loss is shared. Dropout's masks are made for each data shard, so stages with dropout
            need the same number.
        partition: a partition of `model`, with the same parameters: its stages run in turn and dropout is seeded for
            each. Without it the model is one stage.
        seed, step: what dropout's seeds are made of: the engine's `seed`, and how many training steps came before.
        shard_first: cut into data shards first and each shard into microbatches: what a sharded batch does. The merged
            output is in the batch's order all the same.
        return_outputs: False leaves the output None.
        backward: False for losses and outputs only.
        args_chunk_spec, kwargs_chunk_spec, target_chunk_spec, output_merge_spec: as in PipelineEngine.

    Returns:
        losses, loss and output; ``losses[i]`` is microbatch i's, the weighted mean (or the sum) over its data shards.

    Raises:
        ValueError: the batch cannot be cut so, the partition is another model's, or dropout would need stages with
            several numbers of data shards.
    """
    _check_partition(model, partition)
    num_shards = _num_shards(num_data_shards, partition, model.training)
    specs = {
        "args_chunk_spec": args_chunk_spec,
        "kwargs_chunk_spec": kwargs_chunk_spec,
        "target_chunk_spec": target_chunk_spec,
    }
    batch = Microbatch(0, tuple(args), dict(kwargs or {}), target, 0)
    if shard_first:
        shards = _data_shards(_whole(batch, specs), num_shards, specs)
        grid = [
            split_microbatches(s.args, s.kwargs, s.target, num_microbatches=num_microbatches, **specs) for s in shards
        ]
    else:
        parts = split_microbatches(batch.args, batch.kwargs, target, num_microbatches=num_microbatches, **specs)
        columns = [_data_shards(part, num_shards, specs) for part in parts]
        grid = [[column[shard] for column in columns] for shard in range(num_shards)]
    plan = _Plan(model, loss_fn, partition, scale_grads, seed, step, backward)
    total = sum(part.num_samples for row in grid for part in row)
    results = _run_shards(plan, grid, total)
    losses, outputs, sizes = [], [], []
    for index in range(num_microbatches):
        both = [(row[index].num_samples, result[index]) for row, result in zip(grid, results, strict=True)]
        ran = [(count, done) for count, done in both if done is not None]
        sizes.append(sum(count for count, _ in ran))
        losses.append(_weighted_sum([done[0] for _, done in ran], [count for count, _ in ran], scale_grads))
    if return_outputs:
        lines = results if shard_first else list(zip(*results, strict=True))
        outputs = [merge_outputs([done[1] for done in line if done is not None], output_merge_spec) for line in lines]
    merged = merge_outputs(outputs, output_merge_spec) if return_outputs else None
    return SerialResult(losses, _weighted_sum(losses, sizes, scale_grads), merged)


def _check_partition(model: nn.Module, partition: Partition | None) -> None:
    """The gradients of another model's parameters would go where nobody looks."""
    own = {id(parameter) for parameter in model.parameters()}
    for stage in [] if partition is None else partition.stages:
        for name, parameter in stage.module.named_parameters():
            if id(parameter) not in own:
                raise ValueError(
                    f"partition is of another model: parameter {name} of its stage {stage.index} is not model's"
                )


def _num_shards(given: int | Sequence[int], partition: Partition | None, is_training: bool) -> int:
    if isinstance(given, int):
        return given
    stages = [] if partition is None else partition.stages
    if len(given) != max(1, len(stages)):
        raise ValueError(f"num_data_shards has {len(given)} numbers for {max(1, len(stages))} stages")
    random = {number for number, stage in zip(given, stages, strict=False) if stage.uses_rng and is_training}
    if random - {given[-1]}:
        raise ValueError(
            f"stages with dropout have {list(given)} data shards: one process makes the masks for one number of them"
        )
    return given[-1]


def _weighted_sum(losses: list[torch.Tensor], sizes: list[int], scale_grads: bool) -> torch.Tensor:
    weights = loss_weights(sizes, scale_grads)
    return torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)]).sum()


def _whole(batch: Microbatch, specs: dict[str, Any]) -> Microbatch:
    return split_microbatches(batch.args, batch.kwargs, batch.target, num_microbatches=1, **specs)[0]


def _data_shards(part: Microbatch, num_shards: int, specs: dict[str, Any]) -> list[Microbatch]:
    if num_shards == 1:
        return [part]
    sizes = shard_sizes(part.num_samples, num_shards)
    leaves = leaf_specs(part.args, specs["args_chunk_spec"], "args") + leaf_specs(
        part.kwargs, specs["kwargs_chunk_spec"], "kwargs"
    )
    trees = split_tree((part.args, part.kwargs), leaves, sizes, "an argument")
    targets = split_tree(
        part.target, leaf_specs(part.target, specs["target_chunk_spec"], "target"), sizes, "the target"
    )
    return [Microbatch(part.index, trees[d][0], trees[d][1], targets[d], sizes[d]) for d in range(num_shards)]


def _run_shards(plan: _Plan, grid: list[list[Microbatch]], total: int) -> list[list[tuple[torch.Tensor, Any] | None]]:
    if len(grid) == 1:
        return [_run_shard(plan, grid[0], 0, total)]
    parameters = list(plan.model.parameters())
    before = [parameter.grad for parameter in parameters]
    initial = [buffer.detach().clone() for buffer in plan.model.buffers()]
    first = initial
    sums: list[torch.Tensor | None] = [None] * len(parameters)
    results = []
    for shard, row in enumerate(grid):
        _set_buffers(plan.model, initial)
        for parameter in parameters:
            parameter.grad = None
        results.append(_run_shard(plan, row, shard, total))
        if shard == 0:
            first = [buffer.detach().clone() for buffer in plan.model.buffers()]
        sums = [_add(done, parameter.grad) for done, parameter in zip(sums, parameters, strict=True)]
    for parameter, old, new in zip(parameters, before, sums, strict=True):
        parameter.grad = _add(old, new)
    _set_buffers(plan.model, first)
    return results


def _run_shard(plan: _Plan, row: list[Microbatch], shard: int, total: int) -> list[tuple[torch.Tensor, Any] | None]:
    results: list[tuple[torch.Tensor, Any] | None] = []
    for part in row:
        if part.num_samples == 0:
            results.append(None)
            continue
        with torch.set_grad_enabled(plan.backward):
            output = _forward(plan, part, shard)
            loss = loss_of(plan.loss_fn, output, part.target)
            if plan.backward:
                (loss * (part.num_samples / total) if plan.scale_grads else loss).backward()
        detached = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)
        results.append((loss.detach(), detached))
    return results


def _forward(plan: _Plan, part: Microbatch, shard: int) -> Any:
    if plan.partition is None:
        with dropout_rng(
            dropout_seed(seed=plan.seed, step=plan.step, stage=0, microbatch=part.index, data_shard=shard),
            _device(plan.model),
        ):
            return plan.model(*part.args, **part.kwargs)
    partition = plan.partition.for_arguments(part.args, part.kwargs)
    values = partition.bind(part.args, part.kwargs)
    for stage in partition.stages:
        with dropout_rng(
            dropout_seed(seed=plan.seed, step=plan.step, stage=stage.index, microbatch=part.index, data_shard=shard),
            _device(stage.module),
        ):
            results = stage(*[values[name] for name in stage.input_values])
        values.update(zip(stage.output_values, results, strict=True))
    return partition.outputs.unflatten(values)


def _device(module: nn.Module) -> torch.device | None:
    first = next(module.parameters(), None)
    return None if first is None else first.device


def _set_buffers(model: nn.Module, values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), values, strict=True):
            buffer.copy_(value)


def _add(gradient: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None or other is None:
        return other if gradient is None else gradient
    return gradient + other
