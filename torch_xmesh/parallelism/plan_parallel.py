"""The call that plans: a model and devices in, a ParallelPlan out."""

import dataclasses
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_xmesh.parallelism.assembly import Subject, assembled
from torch_xmesh.parallelism.by_hand import plans_by_hand
from torch_xmesh.parallelism.compute import Compute
from torch_xmesh.parallelism.explanation import Explainer
from torch_xmesh.parallelism.judge import Judge, Judged
from torch_xmesh.parallelism.plan import ParallelPlan
from torch_xmesh.parallelism.stages import FoundPlan, NoPlan, StageSearch, in_flight_of
from torch_xmesh.parallelism.subjects import Subjects
from torch_xmesh.spec import Mesh
from torch_xmesh.topology import Topology

_NUM_CANDIDATES = 10
_PATIENCE_SECONDS, _LINE_SECONDS = 2.0, 30.0
"""Before anything is said; and from line to line where that is no terminal."""


def plan_parallel(
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
    max_seconds: float | None = None,
    num_layers: int | None = None,
    collectives: str = "auto",
) -> ParallelPlan:
    """Finds how to run a model on devices: which operators form stages, on which devices each, and how each operator
    is sharded there (L. Zheng et al., Alpa, OSDI 2022). No process group is needed, and nothing is run.

    The model's operators are cut into layers (Alpa's eq. 6). For each mesh that a stage may have, the cheapest sharding
    of each stretch of layers is found (eq. 1, exactly), at several prices of memory. Stages are chosen from these
    (Algorithm 1). The best plans are simulated with their schedules and with the transfers between stages, and the
    fastest is returned. The same arguments give the same plan on every rank and machine.

    Args:
        model: any module that can be recorded, on any device; meta will do. It stays as it is.
        example_args, example_kwargs: the arguments of one microbatch; only shapes and dtypes are used.
        devices: the devices, named by global rank; all are used. In a mesh of two axes each row is a host. In a mesh of
            one axis `topology` says which devices are on which host; without it all are on one.
        num_microbatches: microbatches per step.
        loss_fn: the loss function that the engine will be given. Each device of the last stage computes it on its own
            samples. Its operators are not planned, only how the model's outputs come to these devices. A model that
            computes its own loss is planned with the loss, and needs none.
        memory_limit_bytes: the most bytes that a device may hold, or a dict from host index to bytes where hosts
            differ. None: no limit.
        compute: a device's rates (:class:`Compute`) or measured times (:class:`OperatorTimes`), or a dict of these by
            host index where hosts differ. None: 100 TFLOP/s and 1 TB/s.
        topology: rates and latencies of the links.
        schedule: the name of a schedule (:meth:`Schedule.names`), or "auto" for the best one. It decides how many
            microbatches a stage holds at once, and what is simulated. "duplex": microbatches go in pairs, which take a
            stage's segments in turn (HiDup, S. Zhang et al., SoCC 2022).
        overlap: whether one microbatch computes while another communicates among a stage's devices, with
            ``schedule="auto"``: "auto" where a step is predicted to be faster so, True whatever it takes, False: never.
            Where a step has one microbatch it may be computed in two halves (``plan.num_microbatches`` is 2 then), as
            may each one where ``memory_limit_bytes`` has room for one at a time (``plan.num_microbatches`` doubles).
        max_seconds: how long to search; the best plan so far is returned then, which may differ from run to run. None:
            no limit.
        num_layers: into how many layers the operators are cut; stages are made of whole layers. None: as many as the
            model has blocks that repeat.
        collectives: the cost model of collectives: "ring", "gloo" or "alpa". "auto" takes "gloo" for devices that are
            cpus, else "ring".

    Raises:
        ValueError: the model cannot be recorded or run in stages, or computes nothing from parameters; an argument is
            not what it should be; or no plan keeps the memory limit. The message names the smallest limit for which a
            plan was found.
    """
    _check_seconds(max_seconds)
    given: dict[str, Any] = {
        "devices": devices,
        "num_microbatches": num_microbatches,
        "loss_fn": loss_fn,
        "memory_limit_bytes": memory_limit_bytes,
        "compute": compute,
        "topology": topology,
        "schedule": schedule,
        "overlap": overlap,
        "num_layers": num_layers,
        "collectives": collectives,
    }
    subjects = Subjects.of(model, example_args, example_kwargs, given)
    with _Progress(max_seconds) as progress:

        def plans_of(subject: Subject) -> list[ParallelPlan]:
            judge = Judge(subject.cluster, subject.num_microbatches, subject.stage_schedule)
            return [explained(subject, judged, judge) for judged in _searched(subject, judge, progress)]

        return subjects.best(plans_of)


def explained(subject: Subject, judged: Judged, judge: Judge) -> ParallelPlan:
    """The plan as data, which knows where it comes from."""
    return dataclasses.replace(assembled(subject, judged, judge), _explainer=Explainer(subject.layers, judged))


def _searched(subject: Subject, judge: Judge, progress: "_Progress") -> list[Judged]:
    """The fastest of the best plans; within a memory limit those that people write by hand are among them. And, where
    one microbatch may compute while another communicates, the fastest if all of that were so, where it is another.

    Raises:
        NoPlan: none keeps the limit.
    """
    schedule = subject.stage_schedule
    hiding = Judge(subject.cluster, subject.num_microbatches, schedule, is_hidden=True)
    refused: NoPlan | None = None
    best: Judged | None = None
    hidden: Judged | None = None
    try:
        search, found, best = _best_found(subject, judge, progress)
    except NoPlan as error:
        if not subject.cluster.is_limited:
            raise
        refused = error
    else:
        if subject.may_overlap and progress.go_on():
            hidden = hiding.best(found)
        if progress.go_on():
            best, hidden = (_refined(search, by, one) for by, one in ((judge, best), (hiding, hidden)))
    if subject.cluster.is_limited:
        plans = itertools.takewhile(lambda _: best is None or progress.go_on(), plans_by_hand(subject, schedule))
        by_hand = [*plans]
        best = judge.best(by_hand, than=best)
        if best is None:
            least = min(map(judge.least_limit, by_hand), default=None)
            raise _with_smallest(refused, least, subject, progress)
        if subject.may_overlap:
            hidden = hiding.best(by_hand, than=hidden)
    assert best is not None
    return [best] if hidden is None or hidden.plan is best.plan else [best, hidden]


def _refined(search: StageSearch, judge: Judge, judged: Judged | None) -> Judged | None:
    if judged is None:
        return None
    refined = search.refined(judged.plan)
    return judged if refined is judged.plan else judge.best([judged.plan, refined])


def _best_found(
    subject: Subject, judge: Judge, progress: "_Progress"
) -> tuple[StageSearch, Sequence[FoundPlan], Judged]:
    """The search, the best plans by its tables, and the fastest of these. Raises NoPlan where none that the search
    finds keeps the memory."""
    schedule = subject.stage_schedule
    search = StageSearch(
        subject.layers,
        subject.cluster,
        num_microbatches=subject.num_microbatches,
        collectives=subject.collectives,
        in_flight=in_flight_of(schedule, subject.layers, subject.cluster, subject.num_microbatches),
        on_progress=progress.tell,
    )
    found = search.best(_NUM_CANDIDATES, progress.go_on)
    best = judge.best(found, progress.go_on)
    if best is None:
        raise NoPlan(f"no schedule keeps memory_limit_bytes for any of the {_NUM_CANDIDATES} best plans", None)
    return search, found, best


def _with_smallest(refused: NoPlan | None, least: int | None, subject: Subject, progress: "_Progress") -> NoPlan:
    """Why there is no plan, with the smallest limit that one is known to keep: of those that are written by hand, or
    what the tables of the search say, if a plan is found within that."""
    known = None if refused is None else refused.smallest_limit
    if refused is not None and known is not None and (least is None or known <= least):
        wider = dataclasses.replace(subject, cluster=subject.cluster.limited_to(known))
        try:
            _best_found(wider, Judge(wider.cluster, wider.num_microbatches, wider.stage_schedule), progress)
        except ValueError:  # none, or none in time
            pass
        else:
            return refused
    if least is None:
        return refused or NoPlan("no plan keeps memory_limit_bytes", None)
    given = sorted({kind.memory_bytes for kind in subject.cluster.kinds if kind.memory_bytes is not None})
    limits = ", ".join(map(str, given))
    return NoPlan(f"no plan keeps memory_limit_bytes={limits}: the smallest limit that one keeps is {least}", least)


def _check_seconds(max_seconds: object) -> None:
    is_number = isinstance(max_seconds, int | float) and not isinstance(max_seconds, bool)
    if max_seconds is not None and not (is_number and max_seconds > 0):  # type: ignore[operator]
        raise ValueError(f"max_seconds is a positive number or None, got {max_seconds!r}")


class _Progress:
    """What the first rank says on standard error once it takes long: on a terminal a bar, elsewhere now and then a
    line. And the end of the time."""

    def __init__(self, max_seconds: float | None) -> None:
        self._begun, self._max = time.monotonic(), max_seconds
        self._has_bar, self._next_line = False, _LINE_SECONDS
        self._is_first = not (dist.is_initialized() and dist.get_rank() > 0)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._has_bar:
            print(file=sys.stderr, flush=True)

    def go_on(self) -> bool:
        """Whether there is time left."""
        return self._max is None or time.monotonic() - self._begun < self._max

    def tell(self, done: int, total: int) -> bool:
        """So much is done; whether to go on."""
        seconds = time.monotonic() - self._begun
        if self._is_first and seconds > _PATIENCE_SECONDS and sys.stderr.isatty():
            self._has_bar = True
            filled = 30 * done // max(total, 1)
            bar = "#" * filled + "." * (30 - filled)
            text = f"\rtorch_xmesh: planning [{bar}] {done}/{total} meshes, {seconds:.0f} s"
            print(text, end="", file=sys.stderr, flush=True)
        elif self._is_first and seconds > self._next_line:
            self._next_line = seconds + _LINE_SECONDS
            print(f"torch_xmesh: planning, {done}/{total} meshes, {seconds:.0f} s", file=sys.stderr, flush=True)
        return self.go_on()
