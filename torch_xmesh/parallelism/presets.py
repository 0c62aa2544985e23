"""Plans as people write them by hand, priced as found ones are: ``xm.presets.data_parallel(model, args, devices=...)``.

Each takes the arguments of :func:`plan_parallel`, without `max_seconds`. What a preset leaves open (which dim of a
matrix, where a value is gathered) is still chosen by cost.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torch_xmesh.parallelism.assembly import Subject, assembled
from torch_xmesh.parallelism.cluster import HostKind
from torch_xmesh.parallelism.explanation import Explainer
from torch_xmesh.parallelism.graph import ShardingGraph
from torch_xmesh.parallelism.judge import Judge
from torch_xmesh.parallelism.layers import Layers
from torch_xmesh.parallelism.loops import LATER, PASS, WHOLE, Choice, dim_of, num_devices_used
from torch_xmesh.parallelism.operators import Forward, Operator, Value
from torch_xmesh.parallelism.plan import ParallelPlan
from torch_xmesh.parallelism.plan_parallel import MOST_STAGES, check_count, in_flight_of, subject_of
from torch_xmesh.parallelism.sharded import Sharded
from torch_xmesh.parallelism.space import Space
from torch_xmesh.parallelism.stages import FoundPlan, FoundStage, Shape
from torch_xmesh.parallelism.stretch import Stretch
from torch_xmesh.pipeline.cut.balance import balance
from torch_xmesh.pipeline.cut.profile_memory import UnitCost

__all__ = ["data_parallel", "megatron", "pipeline", "zero_2", "zero_3"]


def data_parallel(model: nn.Module, example_args: Sequence[Any] = (), **options: Any) -> ParallelPlan:
    """Every device has the whole model and a part of the batch; gradients are added up at the end of a step.

    Raises:
        ValueError: as :func:`plan_parallel`; or the batch does not divide by the devices.
    """
    return _preset("data parallel", model, example_args, options, stages=1, tensor=1, zero=0)


def zero_2(model: nn.Module, example_args: Sequence[Any] = (), **options: Any) -> ParallelPlan:
    """Data parallel, with optimizer states and gradients in parts (S. Rajbhandari et al., ZeRO, SC 2020).

    Raises:
        ValueError: as :func:`data_parallel`.
    """
    return _preset("ZeRO-2", model, example_args, options, stages=1, tensor=1, zero=2)


def zero_3(model: nn.Module, example_args: Sequence[Any] = (), **options: Any) -> ParallelPlan:
    """Data parallel, with parameters in parts too, which each microbatch fetches.

    Raises:
        ValueError: as :func:`data_parallel`.
    """
    return _preset("ZeRO-3", model, example_args, options, stages=1, tensor=1, zero=3)


def megatron(
    model: nn.Module, example_args: Sequence[Any] = (), *, tensor_parallel: int, **options: Any
) -> ParallelPlan:
    """Matrices are sharded over `tensor_parallel` devices next to each other, the batch over the rest (M. Shoeybi et
    al., Megatron-LM, 2019).

    Raises:
        ValueError: as :func:`data_parallel`; or `tensor_parallel` does not divide the devices.
    """
    check_count("tensor_parallel", tensor_parallel)
    return _preset(f"Megatron {tensor_parallel}", model, example_args, options, 1, tensor_parallel, 0)


def pipeline(
    model: nn.Module,
    example_args: Sequence[Any] = (),
    *,
    num_stages: int,
    tensor_parallel: int = 1,
    zero: int = 0,
    **options: Any,
) -> ParallelPlan:
    """Stages of about equally many operations, each on as many devices; inside, the batch is sharded, and matrices over
    `tensor_parallel` of them. `zero`: 0, 2 or 3.

    Raises:
        ValueError: as :func:`data_parallel`; or `num_stages` does not divide the devices, or is above 64.
    """
    check_count("num_stages", num_stages)
    check_count("tensor_parallel", tensor_parallel)
    if type(zero) is not int or zero not in (0, 2, 3):
        raise ValueError(f"zero is 0, 2 or 3 (a level of ZeRO that presets have), got {zero!r}")
    title = f"pipeline {num_stages}" + (f" x Megatron {tensor_parallel}" if tensor_parallel > 1 else " x data parallel")
    title += f" x ZeRO-{zero}" if zero else ""
    return _preset(title, model, example_args, options, num_stages, tensor_parallel, zero)


def _preset(
    title: str,
    model: nn.Module,
    example_args: Sequence[Any],
    options: Mapping[str, Any],
    stages: int,
    tensor: int,
    zero: int,
) -> ParallelPlan:
    subject, schedule = subject_of(model, example_args, **options)
    subject = dataclasses.replace(subject, title=title)
    writer = _Writer(subject, schedule, tensor, zero)
    found = writer.written(stages)
    judged = Judge(subject.cluster, subject.num_microbatches, schedule).judged(found)
    if judged is None:
        most = max(round(stage.sharded.bytes.total(stage.in_flight)) for stage in found.stages)
        raise ValueError(f"{title} does not keep memory_limit_bytes: a device would hold about {most} bytes")
    plan = assembled(subject, judged)
    if writer.left:
        names = f"{', '.join(writer.left[:5])}{' ...' if writer.left[5:] else ''}"
        note = f"operators that several devices do alike, since their loops do not divide: {names}"
        plan = dataclasses.replace(plan, notes=(*plan.notes, note))
    return dataclasses.replace(plan, _explainer=Explainer(subject.layers, judged))


class _Writer:
    """Writes one preset."""

    def __init__(self, subject: Subject, schedule: str, tensor: int, zero: int) -> None:
        self._subject, self._schedule, self._tensor, self._zero = subject, schedule, tensor, zero
        self._batch = batch_loops(subject.layers.forward)
        self.left: list[str] = []  # heavy operators that are not done by all devices of their stage

    def written(self, num_stages: int) -> FoundPlan:
        subject = self._subject
        ranks = [rank for host in subject.cluster.hosts for rank in host.ranks]
        if num_stages > MOST_STAGES:
            raise ValueError(f"a plan has at most {MOST_STAGES} stages, got {num_stages}")
        if len(ranks) % num_stages or (len(ranks) // num_stages) % self._tensor:
            raise ValueError(f"{len(ranks)} devices in {num_stages} stages of {self._tensor} x n devices each")
        if num_stages > len(subject.layers):
            raise ValueError(f"{num_stages} stages of a model of {len(subject.layers)} layers: pass num_layers=")
        per_stage = len(ranks) // num_stages
        in_flight = in_flight_of(self._schedule, subject.layers, subject.cluster, subject.num_microbatches)
        stages = tuple(
            self._stage(first, end, tuple(ranks[i * per_stage : (i + 1) * per_stage]), in_flight[num_stages - 1 - i])
            for i, (first, end) in enumerate(even_stages(subject.layers, num_stages))
        )
        return FoundPlan(stages, True)

    def _stage(self, first: int, end: int, ranks: tuple[int, ...], in_flight: int) -> FoundStage:
        subject = self._subject
        shape = (len(ranks) // self._tensor, self._tensor) if self._tensor > 1 else (len(ranks),)
        kind: HostKind = subject.cluster.kind_of(ranks)
        space = Space(
            subject.cluster.links(ranks, shape),
            subject.collectives,
            compute=kind.compute,
            num_microbatches=subject.num_microbatches,
            allowed=functools.partial(self._allowed, shape[0] > 1),
            is_lenient=True,
        )
        stretch = Stretch.of(subject.layers.forward, subject.layers.operators(first, end))
        sharded = ShardingGraph(stretch, space, self._zero).least()
        self._check(sharded, shape)
        return FoundStage(first, end, Shape((), kind, (space,)), ranks, space, sharded, in_flight)

    def _check(self, sharded: Sharded, shape: tuple[int, ...]) -> None:
        """Notes heavy operators that some devices do alike, since their loops do not divide.

        Raises:
            ValueError: that are all of the stage, along the axis over which samples are shared out.
        """
        heavy = [pair for pair in zip(sharded.operators, sharded.choices, strict=True) if pair[0].loops.is_heavy]
        if shape[0] > 1 and heavy and not any(choice.axes[0] not in (WHOLE, PASS, LATER) for _, choice in heavy):
            mesh = " x ".join(map(str, shape))
            raise ValueError(
                f"{self._subject.title} on a mesh of {mesh}: no sharding of {heavy[0][0].name} is left: samples do not "
                f"divide into {shape[0]} parts"
            )
        most = math.prod(shape)
        self.left += [one.name for one, choice in heavy if num_devices_used(choice, shape) < most]

    def _allowed(self, has_data: bool, operator: Operator, choice: Choice) -> bool:
        """The first axis shards the batch, where both have one; the second anything else."""
        batch = self._batch[operator.name] if has_data else None
        first = batch if batch is not None else WHOLE
        if choice.axes[0] != first and not (batch is None and choice.axes[0] in (PASS, LATER)):
            return False
        return len(choice.axes) == 1 or batch is None or choice.axes[1] != batch


def batch_loops(forward: Forward) -> dict[str, str | None]:
    """By operator the loop over samples, followed through the forward: the first dim of arguments that are as long
    along it as the first argument that has dims."""
    samples: dict[Value, int] = {}
    given = (
        value for one in forward.operators for value in one.reads if value.maker is None and not value.is_parameter
    )
    first = min((value for value in given if value.shape), key=lambda value: value.name, default=None)
    batch = None if first is None else first.shape[0]
    out: dict[str, str | None] = {}
    for operator in forward.operators:
        found = None
        labelled = [labels for labels in operator.loops.inputs if labels is not None]
        for value, labels in zip(operator.reads, labelled, strict=True):
            is_argument = value.maker is None and not value.is_parameter
            dim = samples.get(value, 0 if is_argument and value.shape[:1] == (batch,) else None)
            if dim is not None and dim < len(labels) and labels[dim] is not None and found is None:
                names = str(labels[dim]).split("|")
                found = next((name for name in names if name in operator.loops.extents), None)
        out[operator.name] = found
        for value, labels in zip(operator.makes, operator.loops.outputs, strict=True):
            dim = None if found is None else dim_of(labels, found)
            if dim is not None:
                samples[value] = dim
    return out


def even_stages(layers: Layers, num_stages: int) -> list[tuple[int, int]]:
    """Layers in so many stages whose operations are about as many."""
    units = [
        UnitCost(layers.name(layer), sum(layers.forward.operators[number].loops.flops for number in numbers))
        for layer, numbers in enumerate(layers.numbers)
    ]
    starts = balance(units, num_stages, None, [1] * num_stages)
    return list(itertools.pairwise([0, *starts, len(layers)]))
