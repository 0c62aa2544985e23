"""Plans as people write them by hand, priced as found ones are: ``xm.presets.data_parallel(model, args, devices=...)``.

Each takes the arguments of :func:`plan_parallel`, without `max_seconds`. What a preset leaves open (which dim of a
matrix, where a value is gathered) is still chosen by cost.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torch_xmesh.arguments import positive_int
from torch_xmesh.parallelism.assembly import Subject
from torch_xmesh.parallelism.by_hand import Writer
from torch_xmesh.parallelism.judge import Judge
from torch_xmesh.parallelism.plan import ParallelPlan
from torch_xmesh.parallelism.plan_parallel import explained
from torch_xmesh.parallelism.stages import NoPlan
from torch_xmesh.parallelism.subjects import Subjects

__all__ = ["data_parallel", "megatron", "pipeline", "zero_2", "zero_3"]


def data_parallel(model: nn.Module, example_args: Sequence[Any] = (), **options: Any) -> ParallelPlan:
    """Every device has the whole model and a part of the batch; gradients are added up at the end of a step. `options`
    are those of :func:`plan_parallel` but `max_seconds`; `devices` and `num_microbatches` are needed.

    Raises:
        ValueError: as :func:`plan_parallel`; or the batch does not divide by the devices.
    """
    return _preset("data parallel", model, example_args, options, stages=1, tensor=1, zero=0)


def zero_2(model: nn.Module, example_args: Sequence[Any] = (), **options: Any) -> ParallelPlan:
    """Data parallel, with optimizer states and gradients sharded over the devices (S. Rajbhandari et al., ZeRO, SC
    2020). `options`: as in :func:`data_parallel`.

    Raises:
        ValueError: as :func:`data_parallel`.
    """
    return _preset("ZeRO-2", model, example_args, options, stages=1, tensor=1, zero=2)


def zero_3(model: nn.Module, example_args: Sequence[Any] = (), **options: Any) -> ParallelPlan:
    """As :func:`zero_2`, with parameters sharded too: each microbatch gathers them. `options`: as in
    :func:`data_parallel`.

    Raises:
        ValueError: as :func:`data_parallel`.
    """
    return _preset("ZeRO-3", model, example_args, options, stages=1, tensor=1, zero=3)


def megatron(
    model: nn.Module, example_args: Sequence[Any] = (), *, tensor_parallel: int, **options: Any
) -> ParallelPlan:
    """Matrices are sharded over `tensor_parallel` neighboring devices, the batch over the rest (M. Shoeybi et al.,
    Megatron-LM, 2019). `options`: as in :func:`data_parallel`.

    Raises:
        ValueError: as :func:`data_parallel`; or `tensor_parallel` does not divide the devices.
    """
    positive_int("tensor_parallel", tensor_parallel)
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
    """Stages of about equally many operations, each on as many devices. In a stage matrices are sharded over
    `tensor_parallel` devices, the batch over the rest. `zero`: the level of ZeRO, 0 (none), 2 or 3. `options`: as in
    :func:`data_parallel`.

    Raises:
        ValueError: as :func:`data_parallel`; or `num_stages` does not divide the devices, or is above 64.
    """
    positive_int("num_stages", num_stages)
    positive_int("tensor_parallel", tensor_parallel)
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
    given = {name: value for name, value in options.items() if name != "example_kwargs"}
    subjects = Subjects.of(model, example_args, options.get("example_kwargs"), given)
    return subjects.best(lambda subject: [_written(dataclasses.replace(subject, title=title), stages, tensor, zero)])


def _written(subject: Subject, stages: int, tensor: int, zero: int) -> ParallelPlan:
    writer = Writer(subject, subject.stage_schedule, tensor, zero)
    found = writer.written(stages)
    judge = Judge(subject.cluster, subject.num_microbatches, subject.stage_schedule)
    judged = judge.judged(found)
    if judged is None:
        most = judge.least_limit(found)
        raise NoPlan(f"{subject.title} does not keep memory_limit_bytes: a device would hold {most} bytes", most)
    plan = explained(subject, judged, judge)
    if writer.left:
        names = f"{', '.join(writer.left[:5])}{' ...' if writer.left[5:] else ''}"
        note = f"operators that several devices do alike, since their loops do not divide: {names}"
        plan = dataclasses.replace(plan, notes=(*plan.notes, note))
    return plan
