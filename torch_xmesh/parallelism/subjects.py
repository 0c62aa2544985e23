"""What is planned: a model with its microbatch on a cluster, and, where that may be faster, with it in two halves that
take turns: a step has one microbatch, or memory has room for one."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_xmesh import _C
from torch_xmesh.arguments import MOST_LAYERS, MOST_MICROBATCHES, no_inference_tensors, positive_int
from torch_xmesh.parallelism.assembly import Subject
from torch_xmesh.parallelism.cluster import cluster_of
from torch_xmesh.parallelism.compute import Compute
from torch_xmesh.parallelism.forward_modes import runnable
from torch_xmesh.parallelism.layers import layers_of
from torch_xmesh.parallelism.overlap import AUTO, DUPLEX, LEAST_GAIN, orders_segments, with_note
from torch_xmesh.parallelism.plan import ParallelPlan
from torch_xmesh.parallelism.recorded_forwards import part_of_samples, samples_of
from torch_xmesh.parallelism.stages import NoPlan
from torch_xmesh.pipeline.cut.partition import check_example
from torch_xmesh.pipeline.schedule.schedule import schedule_name
from torch_xmesh.spec import Mesh
from torch_xmesh.topology import Topology


def subject_of(
    model: nn.Module,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    devices: Mesh | DeviceMesh,
    num_microbatches: int,
    loss_fn: Any = None,
    memory_limit_bytes: int | Mapping[int, int] | None = None,
    compute: Compute | Mapping[int, Compute] | None = None,
    topology: Topology | None = None,
    schedule: str = "auto",
    overlap: str | bool = "auto",
    num_layers: int | None = None,
    collectives: str = "auto",
) -> Subject:
    """What is planned, from the arguments of :func:`plan_parallel`."""
    positive_int("num_microbatches", num_microbatches, MOST_MICROBATCHES)
    if num_layers is not None:
        positive_int("num_layers", num_layers, MOST_LAYERS)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is an nn.Module, got {model!r} ({type(model).__name__})")
    no_inference_tensors(model)
    if loss_fn is not None and not callable(loss_fn):
        raise ValueError(f"loss_fn is a function or None, got {loss_fn!r} ({type(loss_fn).__name__})")
    check_example(model, example_args, example_kwargs, None)
    name = schedule if schedule in (AUTO, DUPLEX) else schedule_name(schedule)
    _check_overlap(overlap, name)
    cluster = cluster_of(devices, topology, compute, memory_limit_bytes)
    costs = _collectives(collectives, devices)
    arguments = tuple(example_args), dict(example_kwargs or {})
    modes = runnable(model, *arguments, checks_next=False)
    forward = dataclasses.replace(modes.recorded.forward, num_samples=samples_of(*arguments))
    layers = layers_of(forward, num_layers)
    return Subject(type(model).__name__, modes, layers, cluster, num_microbatches, costs, name, overlap)


@dataclasses.dataclass(frozen=True)
class Subjects:
    """What is planned: a model with its microbatch, and in halves of it.

    Attributes:
        halves: makes that subject; None: there is none. It raises ValueError where a half cannot be recorded.
        no_halves: why there is none though overlap is asked for.
    """

    whole: Subject
    halves: Callable[[], Subject] | None = None
    no_halves: str = ""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> "Subjects":
        """From the arguments of :func:`plan_parallel`."""
        whole = subject_of(model, args, kwargs, **options)
        if whole.overlap is False or whole.schedule not in (AUTO, DUPLEX):
            return cls(whole)
        if whole.num_microbatches > 1 and not whole.cluster.is_limited:
            return cls(whole)
        half = part_of_samples(args, kwargs or {}, 2)
        if half is None:
            return cls(whole, None, "its samples along dim 0 do not divide into two parts")
        count = 2 * whole.num_microbatches
        if whole.cluster.num_devices == 1 or count > MOST_MICROBATCHES:
            return cls(whole)

        def halves() -> Subject:
            made = subject_of(model, *half, **{**options, "num_microbatches": count})
            return dataclasses.replace(made, parts=2)

        return cls(whole, halves)

    def best(self, plans_of: Callable[[Subject], list[ParallelPlan]]) -> ParallelPlan:
        """The fastest plan; where overlap is asked for that of halves, if there is one. Halves that cannot be planned
        are left out, as are those for which there is no time.

        Raises:
            ValueError: there is no plan.
        """
        if self.whole.num_microbatches > 1:
            return self._best_of_several(plans_of)
        if self._is_asked:
            halves, reason = self._of_halves(plans_of)
            if halves:
                return fastest(halves)
            plan, because = fastest(plans_of(self.whole)), str(reason or self.no_halves)
            return with_note(plan, f"the microbatch is not computed in halves: {because}") if because else plan
        whole: list[ParallelPlan] = []
        refused: NoPlan | None = None
        try:
            whole = plans_of(self.whole)
        except NoPlan as error:
            refused = error
        halves, reason = self._of_halves(plans_of)
        if refused is not None and not halves:
            raise _less_refused(refused, reason)
        return _best_of(whole, halves)

    @property
    def _is_asked(self) -> bool:
        return self.whole.overlap is True or self.whole.schedule == DUPLEX

    def _best_of_several(self, plans_of: Callable[[Subject], list[ParallelPlan]]) -> ParallelPlan:
        """Whole microbatches take turns, or, where memory has room for one at a time, halves of them."""
        whole: list[ParallelPlan] = []
        refused: NoPlan | None = None
        try:
            whole = plans_of(self.whole)
        except NoPlan as error:
            if self.whole.schedule != DUPLEX:
                raise
            refused = error
        halves, reason = self._of_halves(plans_of) if refused or any(map(_waits, whole)) else ([], None)
        if refused is not None and not halves:
            raise _less_refused(refused, reason)
        if halves and self._is_asked:
            whole = [plan for plan in whole if orders_segments(plan)]
        return _best_of(whole, halves)

    def _of_halves(
        self, plans_of: Callable[[Subject], list[ParallelPlan]]
    ) -> tuple[list[ParallelPlan], ValueError | None]:
        """Or why there are none, where somebody says why."""
        try:
            return ([], None) if self.halves is None else (plans_of(self.halves()), None)
        except ValueError as error:
            return [], error
        except KeyboardInterrupt:
            return [], None


def _waits(plan: ParallelPlan) -> bool:
    """Whether a stage's devices hold one microbatch at a time, and have nothing to compute while they communicate."""
    return any(stage.edges and stage.in_flight == 1 for stage in plan.stages)


def _less_refused(whole: NoPlan, halves: ValueError | None) -> NoPlan:
    """That which names the smaller limit that would do."""
    if isinstance(halves, NoPlan) and None not in (whole.smallest_limit, halves.smallest_limit):
        return min((whole, halves), key=lambda refused: refused.smallest_limit or 0)
    return whole


def fastest(plans: Sequence[ParallelPlan]) -> ParallelPlan:
    """The first plan, unless another one's step is shorter by more than what predictions are worth."""
    best = plans[0]
    for plan in plans[1:]:
        if plan.predicted_seconds <= LEAST_GAIN * best.predicted_seconds:
            best = plan
    return best


def _best_of(whole: Sequence[ParallelPlan], halves: Sequence[ParallelPlan]) -> ParallelPlan:
    """The fastest of all; one in halves says what the whole microbatch takes."""
    best = fastest([*whole, *halves])
    if best.parts == 1 or not whole:
        return best
    serial = min(plan.predicted_seconds for plan in whole)
    return dataclasses.replace(best, step=dataclasses.replace(best.step, serial=serial))


def _check_overlap(overlap: object, schedule: str) -> None:
    if overlap != AUTO and not isinstance(overlap, bool):
        raise ValueError(f'overlap is "auto", True or False, got {overlap!r}')
    if overlap is True and schedule not in (AUTO, DUPLEX):
        raise ValueError(f'overlap=True orders segments itself, which schedule={schedule!r} does: pass schedule="auto"')
    if overlap is False and schedule == DUPLEX:
        raise ValueError('schedule="duplex" computes one microbatch while another communicates, overlap=False does not')


def _collectives(name: str, devices: Any) -> str:
    known = [model for model, _ in _C.collective_cost_models()]
    if name == "auto":
        return "gloo" if getattr(devices, "device_type", None) == "cpu" else "ring"
    if name not in known:
        raise ValueError(f"there is no cost model of collectives named {name!r}: they are auto, {', '.join(known)}")
    return name
