"""What a plan's step takes: its schedule played with what stages and the values between them take."""

import dataclasses
from collections.abc import Callable, Sequence

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torch_xmesh.parallelism.cluster import Cluster
from torch_xmesh.parallelism.loops import PARTIAL, State
from torch_xmesh.parallelism.operators import Operator, Value
from torch_xmesh.parallelism.rows.experts import CLASSES
from torch_xmesh.parallelism.stages import FoundPlan, FoundStage
from torch_xmesh.pipeline.schedule.choice import choose_schedule
from torch_xmesh.pipeline.schedule.schedule import Schedule
from torch_xmesh.pipeline.schedule.simulation import Costs, EdgeCosts, Simulation, StageCosts, simulate
from torch_xmesh.plan import plan_resharding
from torch_xmesh.spec import Mesh, Spec
from torch_xmesh.topology import Topology

_MOST_PLANNED_RANKS = 64
"""Values between more devices are not planned, but taken to use all network interfaces evenly."""
_MOST_CHOSEN_ACTIONS = 8192
"""For a step with more actions no schedule is searched for: only the two that hold least are tried."""
_MOST_CHOSEN = 4
"""Plans, the fastest with a schedule by name, for which one is chosen among all: that takes about a second each."""


@dataclasses.dataclass(frozen=True)
class StageTransfer:
    """A value from one stage to a later one.

    Attributes:
        seconds: forward, and its gradient's backward.
    """

    from_stage: int
    to_stage: int
    value: Value
    src: State
    dst: State
    seconds: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Tie:
    """A trained parameter of several stages: its gradients are brought to the first of them, their sum to the others.

    Attributes:
        seconds: that takes, at the end of a step.
    """

    name: str
    stages: tuple[int, ...]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Judged:
    """A plan with its schedule.

    Attributes:
        step_seconds: time of a step, including the sums of gradients at its end.
        simulation: the schedule simulated, without these sums.
        peak_bytes: by stage.
    """

    plan: FoundPlan
    schedule: Schedule
    transfers: tuple[StageTransfer, ...]
    ties: tuple[Tie, ...]
    simulation: Simulation
    step_seconds: float
    peak_bytes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Played:
    """A plan as its schedules see it.

    Attributes:
        costs: with `spare` bytes more on each stage, so that one limit, the largest, holds for all.
    """

    plan: FoundPlan
    transfers: tuple[StageTransfer, ...]
    ties: tuple[Tie, ...]
    costs: Costs
    spare: tuple[int, ...]
    limit: int | None
    num_microbatches: int

    @property
    def least_seconds(self) -> float:
        """No schedule's step takes less: a stage begins when the first microbatch has come through those before it, and
        all of its gradients go back through them."""
        out = forwards = backwards = 0.0
        for stage, costs in zip(self.plan.stages, self.costs.stages, strict=True):
            in_turn = costs.forward_seconds + costs.backward_input_seconds
            busy = self.num_microbatches * (in_turn + costs.backward_weight_seconds)
            out = max(
                out,
                forwards + busy + stage.sharded.seconds.step_collectives,
                forwards + self.num_microbatches * in_turn + backwards,
            )
            forwards += costs.forward_seconds
            backwards += costs.backward_input_seconds
        return out


class Judge:
    """Plays plans on a cluster; what moves between equal meshes is planned once. `is_hidden`: a stage's collectives are
    taken to be under another microbatch's computation."""

    def __init__(self, cluster: Cluster, num_microbatches: int, schedule: str, *, is_hidden: bool = False) -> None:
        self._cluster, self._num_microbatches, self._schedule = cluster, num_microbatches, schedule
        self._is_hidden = is_hidden
        self._seconds: dict[tuple[object, ...], float] = {}
        host_of = {rank: number for number, host in enumerate(cluster.hosts) for rank in host.ranks}
        self._host_of = host_of
        rates = {number: round(host.kind.nic_bytes_per_s) for number, host in enumerate(cluster.hosts)}
        self._topology = Topology(
            host_of,
            nic_of_host=rates,
            local_bytes_per_s=round(cluster.local_bytes_per_s),
            latency_us=cluster.latency_s * 1e6,
            local_latency_us=cluster.local_latency_s * 1e6,
        )

    def best(
        self, plans: Sequence[FoundPlan], go_on: Callable[[], bool] = lambda: True, than: Judged | None = None
    ) -> Judged | None:
        """The fastest of `than` and some plans, the first of equal ones; None where none keeps the memory. Those that
        may be the best are played with schedules by name, and with the schedule that is chosen for them. An interrupt
        or the end of the time leaves the best so far."""
        found: list[tuple[_Played, Judged]] = []
        best = than
        try:
            for plan in plans:
                played = self._played(plan)
                if best is not None and played.least_seconds >= best.step_seconds:
                    continue
                judged = self._judged(played, self._by_name(played))
                if judged is not None:
                    found.append((played, judged))
                    best = _faster(best, judged)
                if best is not None and not go_on():
                    return best
            found.sort(key=lambda pair: pair[1].step_seconds)
            for played, _ in found[:_MOST_CHOSEN]:
                if best is not None and played.least_seconds < best.step_seconds and go_on():
                    best = _faster(best, self._judged(played, self._chosen(played)))
        except KeyboardInterrupt:
            if best is None:
                raise
        return best

    def judged(self, plan: FoundPlan) -> Judged | None:
        """A plan with the fastest schedule, or the one that is asked for; None where none keeps the memory."""
        return self.best([plan])

    def least_limit(self, plan: FoundPlan) -> int:
        """The smallest memory limit of devices, the same for all, that a schedule by name keeps."""
        costs = self._costs(plan.stages, (), [0] * len(plan.stages))
        return min(max(simulate(schedule, costs).peak_bytes) for schedule in self._schedules(len(plan.stages)))

    def _schedules(self, num_stages: int) -> list[Schedule]:
        """Those by name that are tried: the one that is asked for, or two that hold little."""
        names = ["1f1b", "eager_1f1b"] if self._schedule == "auto" else [self._schedule]
        return [Schedule.make(name, num_stages, self._num_microbatches) for name in names]

    def _played(self, plan: FoundPlan) -> "_Played":
        transfers = self._transfers(plan.stages)
        most, spare = spare_of([stage.shape.kind.memory_bytes for stage in plan.stages])
        costs = self._costs(plan.stages, transfers, spare)
        ties = self._ties(plan.stages)
        return _Played(plan, tuple(transfers), ties, costs, tuple(spare), most, self._num_microbatches)

    def _judged(self, played: "_Played", schedule: Schedule | None) -> Judged | None:
        if schedule is None:
            return None
        plan = played.plan
        simulation = simulate(schedule, played.costs)
        ends = [0.0] * len(plan.stages)
        for action in simulation.actions:
            ends[action.place] = max(ends[action.place], action.end_seconds)
        sums = [stage.sharded.seconds.step_collectives for stage in plan.stages]
        for tie in played.ties:
            for number in tie.stages:
                sums[number] += tie.seconds
        step = max(end + own for end, own in zip(ends, sums, strict=True))
        peak = tuple(held - extra for held, extra in zip(simulation.peak_bytes, played.spare, strict=True))
        return Judged(plan, schedule, played.transfers, played.ties, simulation, step, peak)

    def _costs(self, stages: Sequence[FoundStage], transfers: Sequence[StageTransfer], spare: Sequence[int]) -> Costs:
        moves = [
            (transfer.from_stage, transfer.to_stage, transfer.seconds, transfer.value.requires_grad)
            for transfer in transfers
        ]
        edges = edges_between(len(stages), moves)
        rows = [
            stage_costs(stage, extra, is_hidden=self._is_hidden) for stage, extra in zip(stages, spare, strict=True)
        ]
        return Costs(stages=rows, edges=edges, blocks_receiver=False)

    def _chosen(self, played: "_Played") -> Schedule | None:
        """The best of all schedules, where it may be chosen and is not too long."""
        num_stages = len(played.plan.stages)
        if self._schedule != "auto" or 2 * num_stages * self._num_microbatches > _MOST_CHOSEN_ACTIONS:
            return None
        choice = choose_schedule(
            played.costs,
            num_stages=num_stages,
            num_microbatches=self._num_microbatches,
            memory_limit_bytes=played.limit,
        )
        return choice.schedule

    def _by_name(self, played: "_Played") -> Schedule | None:
        """The schedule that is asked for, or the fastest of those that hold least; None where none keeps the memory."""
        found = []
        for number, schedule in enumerate(self._schedules(len(played.plan.stages))):
            simulation = simulate(schedule, played.costs)
            if played.limit is None or max(simulation.peak_bytes) <= played.limit:
                found.append((simulation.makespan_seconds, number, schedule))
        return min(found, key=lambda row: row[:2])[2] if found else None

    def _transfers(self, stages: Sequence[FoundStage]) -> list[StageTransfer]:
        maker = {value: number for number, stage in enumerate(stages) for value in stage.sharded.leaving}
        out = []
        for number, stage in enumerate(stages):
            for value, dst in stage.sharded.entering.items():
                source = maker[value]
                src = stages[source].sharded.leaving[value]
                ways = (stages[source], src), (stage, dst)
                backward = self._moved(value, ways[1], ways[0]) if value.requires_grad else 0.0
                seconds = self._moved(value, *ways), backward
                out.append(StageTransfer(source, number, value, src, dst, seconds))
        return out

    def _ties(self, stages: Sequence[FoundStage]) -> tuple[Tie, ...]:
        held: dict[str, list[int]] = {}
        for number, stage in enumerate(stages):
            for name, (value, _) in stage.sharded.parameters.items():
                if value.is_trained:
                    held.setdefault(name, []).append(number)
        out = []
        for name, (first, *others) in held.items():
            value, state = stages[first].sharded.parameters[name]
            seconds = 0.0
            for other in others:
                ends = (stages[first], state), (stages[other], stages[other].sharded.parameters[name][1])
                seconds += self._moved(value, *ends) + self._moved(value, *reversed(ends))
            if others:
                out.append(Tie(name, (first, *others), seconds))
        return tuple(out)

    def moved_within(self, value: Value, stage: FoundStage, src: State, dst: State) -> float:
        """Seconds that a value takes from one sharding to another among a stage's devices."""
        return self._moved(value, (stage, src), (stage, dst))

    def _moved(self, value: Value, src: tuple[FoundStage, State], dst: tuple[FoundStage, State]) -> float:
        """Seconds that a value takes from one mesh to another."""
        names: dict[int, int] = {}
        hosts = tuple(
            tuple(names.setdefault(self._host_of[rank], len(names)) for rank in stage.ranks) for stage, _ in (src, dst)
        )
        rates = tuple(self._cluster.hosts[host].kind.nic_bytes_per_s for host in names)
        shapes = tuple(stage.space.shape for stage, _ in (src, dst))
        key = (value.shape, value.dtype, src[1], dst[1], shapes, hosts, rates)
        if key not in self._seconds:
            self._seconds[key] = self._planned(value, src, dst)
        return self._seconds[key]

    def _planned(self, value: Value, src: tuple[FoundStage, State], dst: tuple[FoundStage, State]) -> float:
        if len(src[0].ranks) + len(dst[0].ranks) > _MOST_PLANNED_RANKS:
            sides = ({self._host_of[rank] for rank in stage.ranks} for stage, _ in (src, dst))
            return self._cluster.latency_s + value.num_bytes / min(
                sum(self._cluster.hosts[host].kind.nic_bytes_per_s for host in side) for side in sides
            )
        spec = Spec(value.shape, value.dtype, mesh_of(src[0]), placements_of(src[1]))
        plan = plan_resharding(spec, mesh_of(dst[0]), placements_of(dst[1]), topology=self._topology)
        return plan.predicted_seconds


def spare_of(limits: Sequence[int | None]) -> tuple[int | None, list[int]]:
    """The largest of the stages' limits of bytes, and by stage what is counted as held more, so that this one holds for
    all."""
    most = max((limit for limit in limits if limit is not None), default=None)
    return most, [0 if limit is None or most is None else most - limit for limit in limits]


def _faster(best: Judged | None, other: Judged | None) -> Judged | None:
    """The plan whose step is shorter, the first if both take as long. None stands for no plan."""
    if best is None or other is None:
        return best or other
    return other if other.step_seconds < best.step_seconds else best


Move = tuple[int, int, tuple[float, float], bool]
"""A value from a stage to another: seconds forward and backward, whether it has a gradient."""


def edges_between(num_stages: int, moves: Sequence[Move]) -> dict[tuple[int, int], EdgeCosts | float]:
    """What values that go the same way take together; stages next to each other always follow one another."""
    out: dict[tuple[int, int], EdgeCosts | float] = {(stage, stage + 1): 0.0 for stage in range(num_stages - 1)}
    for ends in dict.fromkeys((source, target) for source, target, _, _ in moves):
        mine = [(seconds, has_gradient) for source, target, seconds, has_gradient in moves if (source, target) == ends]
        out[ends] = EdgeCosts(
            forward_seconds=sum(seconds[0] for seconds, _ in mine),
            backward_seconds=sum(seconds[1] for seconds, _ in mine),
            has_gradient=any(has_gradient for _, has_gradient in mine),
        )
    return out


def stage_costs(stage: FoundStage, extra_bytes: int = 0, *, is_hidden: bool = False) -> StageCosts:
    """A stage's costs, with times and activations of one microbatch."""
    held = stage.sharded.bytes
    return stage.sharded.seconds.costs(
        is_whole=is_whole(stage),
        is_hidden=is_hidden,
        activation_bytes=round(held.per_microbatch),
        fixed_bytes=round(held.fixed) + extra_bytes,
    )


def is_whole(stage: FoundStage) -> bool:
    """Whether its backward runs at once: an activation checkpoint is computed anew for both halves, as are parameters
    fetched (ZeRO-3); experts are given tokens, or none, on some devices alone."""
    sharded = stage.sharded
    return 3 in sharded.zero_levels.values() or any(map(is_never_split, sharded.operators))


def is_never_split(operator: Operator) -> bool:
    """Whether the backward of what it is in runs at once: see :func:`is_whole`."""
    return operator.is_given_again or operator.kind in CLASSES


def mesh_of(stage: FoundStage) -> Mesh:
    """The mesh that a stage's devices are."""
    return Mesh(grid_of(stage.ranks, stage.space.shape))


def grid_of(ranks: Sequence[int], shape: Sequence[int]) -> list[object]:
    """Ranks as nested lists, row-major."""
    if len(shape) <= 1:
        return list(ranks)
    step = len(ranks) // shape[0]
    return [grid_of(ranks[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def placements_of(state: State) -> list[Placement]:
    """As torch says it."""
    return [Shard(held) if held >= 0 else Partial() if held == PARTIAL else Replicate() for held in state]
