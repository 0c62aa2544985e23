"""Stages and their submeshes: Alpa, section 5, Algorithm 1, with tables of what layers take on each mesh.

layers --> on each mesh: the cheapest shardings of the whole model --> what each layer takes and holds with them
       --> StageProblem: any stretch of layers on any submesh --> the best plans, by eq. 2
       --> their stages, each sharded by itself, exactly
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from torch_xmesh import _C
from torch_xmesh.parallelism.cluster import Cluster, HostKind, logical_shapes
from torch_xmesh.parallelism.graph import ShardingGraph
from torch_xmesh.parallelism.layers import Layers
from torch_xmesh.parallelism.limit import Fitting, within_limit
from torch_xmesh.parallelism.sharded import Sharded
from torch_xmesh.parallelism.space import Space
from torch_xmesh.parallelism.stretch import Stretch
from torch_xmesh.parallelism.stretch_tables import StretchTables, Table
from torch_xmesh.parallelism.trade import variants
from torch_xmesh.parallelism.zero import LEVELS, with_zero

UNLIMITED = 2**62
MOST_STAGES = 64
_MOST_BRANCHES = 24
_STAGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""The best plan of each of these numbers of stages is looked at, too."""
_MUCH_SLOWER = 10.0
"""Unless it takes so many times as long, by the tables."""
_MANY_HOSTS = 16
"""With more hosts of one kind than this, a stage has a power of two of its hosts, or all of them."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A submesh that stages may have.

    Attributes:
        parts: (class, hosts, devices of each).
        kind: what its devices do and hold.
        spaces: the meshes that it is looked at as.
    """

    parts: tuple[tuple[int, int, int], ...]
    kind: HostKind
    spaces: tuple[Space, ...]

    @property
    def num_devices(self) -> int:
        return sum(hosts * devices for _, hosts, devices in self.parts)

    @property
    def memory_bytes(self) -> int:
        return UNLIMITED if self.kind.memory_bytes is None else self.kind.memory_bytes

    def __str__(self) -> str:
        return " + ".join(f"{hosts} x {devices}" for _, hosts, devices in self.parts)


@dataclasses.dataclass(frozen=True)
class FoundStage:
    """A stage of a plan.

    Attributes:
        first, end: its layers.
        ranks: its devices, in the order of the mesh that `space` is.
        in_flight: microbatches that it holds at most.
        gap: by which part of its cost another sharding that fits may be cheaper; 0: none is.
    """

    first: int
    end: int
    shape: Shape
    ranks: tuple[int, ...]
    space: Space
    sharded: Sharded
    in_flight: int
    gap: float = 0.0


@dataclasses.dataclass(frozen=True)
class FoundPlan:
    """Stages in order. `is_proven`: the first plan of the search is the best by its tables."""

    stages: tuple[FoundStage, ...]
    is_proven: bool


class NoPlan(ValueError):
    """No plan keeps the memory, or uses all devices.

    Attributes:
        smallest_limit: that a plan keeps, by the tables of the search; None: not known.
    """

    def __init__(self, text: str, smallest_limit: int | None) -> None:
        super().__init__(text)
        self.smallest_limit = smallest_limit


def in_flight_of(schedule: str, layers: Layers, cluster: Cluster, num_microbatches: int) -> list[int]:
    """How many microbatches a stage holds, by the number of stages behind it (M. Narayanan et al., 1F1B)."""
    count = min(len(layers), cluster.num_devices, MOST_STAGES)
    if schedule in ("gpipe", "looped_bfs"):
        return [num_microbatches] * count
    if schedule in ("eager_1f1b", "eager_split"):
        return [min(num_microbatches, 2 * behind + 1) for behind in range(count)]
    return [min(num_microbatches, behind + 1) for behind in range(count)]


class _Graphs(Sequence[ShardingGraph]):
    """The graphs of a stretch, one for each level of parameters in parts (LEVELS), made when they are asked for."""

    def __init__(self, stretch: Stretch, space: Space) -> None:
        self._stretch, self._space = stretch, space
        self._made: dict[int, ShardingGraph] = {}

    def __len__(self) -> int:
        return len(LEVELS)

    def __getitem__(self, number: int) -> ShardingGraph:  # type: ignore[override]
        if number not in self._made:
            self._made[number] = ShardingGraph(self._stretch, self._space, LEVELS[number])
        return self._made[number]


class StageSearch:
    """All ways to run a model's layers on a cluster.

    Args:
        in_flight: how many microbatches a stage holds, by the number of stages behind it; as many stages at most.
        collectives: the cost model.
        on_progress: told (done, of how many) meshes, and, where it returns False, no more are looked at.

    Raises:
        ValueError: no plan fits the memory of devices: the least that would do, and where it is needed.
    """

    def __init__(
        self,
        layers: Layers,
        cluster: Cluster,
        *,
        num_microbatches: int,
        collectives: str,
        in_flight: Sequence[int],
        on_progress: Callable[[int, int], bool] = lambda done, total: True,
    ) -> None:
        self._layers, self._cluster = layers, cluster
        self._num_microbatches, self._collectives = num_microbatches, collectives
        self._in_flight, self._on_progress = list(in_flight), on_progress
        self._spaces: dict[tuple[object, ...], Space] = {}
        self._classes = [(len(cluster.hosts_of(kind)), kind.num_devices) for kind in cluster.kinds]
        self._whole = Stretch.of(layers.forward)
        self._stretches: dict[tuple[int, int], Stretch] = {}
        self._graphs: dict[tuple[int, int, int], _Graphs] = {}
        self._fittings: dict[tuple[int, ...], Fitting | None] = {}
        self._ways: dict[int, list[tuple[Space, Sharded]]] = {}
        self._is_complete = True  # no mesh was left out, and the cheapest sharding on each was found
        self.shapes = [self._shape(parts) for parts in self._submeshes()]

    def _submeshes(self) -> list[list[tuple[int, int, int]]]:
        many = any(num_hosts > _MANY_HOSTS for num_hosts, _ in self._classes)
        return _C.submesh_shapes(self._classes, powers_of_two=many, is_mixed=len(self._classes) > 1)

    def _shape(self, parts: Sequence[tuple[int, int, int]]) -> Shape:
        """Its links are those of the first hosts that it may have."""
        ranks = [
            rank
            for kind, num_hosts, devices in parts
            for host in self._cluster.hosts_of(self._cluster.kinds[kind])[:num_hosts]
            for rank in host.ranks[:devices]
        ]
        kind = self._cluster.kind_of(ranks)
        per_host = parts[0][2] if len({devices for _, _, devices in parts}) == 1 else len(ranks)
        shapes = logical_shapes(len(ranks) // per_host, per_host)
        return Shape(tuple(parts), kind, tuple(self._space(ranks, shape, kind) for shape in shapes))

    def _space(self, ranks: Sequence[int], shape: Sequence[int], kind: HostKind) -> Space:
        links = self._cluster.links(ranks, shape)
        key = (tuple(links), kind.compute)
        if key not in self._spaces:
            self._spaces[key] = Space(
                links, self._collectives, compute=kind.compute, num_microbatches=self._num_microbatches
            )
        return self._spaces[key]

    # What is asked for.

    def best(self, count: int, go_on: Callable[[], bool] | None = None) -> list[FoundPlan]:
        """The cheapest plans, at most so many, and the cheapest of some numbers of stages, of which a schedule may hide
        more than the tables know: the first is the best by these."""
        problem = self._problem()
        plans = problem.best_plans(count, accepts=self._can_be_placed, go_on=go_on)
        for number in _STAGES:
            if plans and number <= len(self._layers) and (go_on is None or go_on()):
                best = problem.best_plans(1, accepts=self._can_be_placed, go_on=go_on, num_stages=number)
                known = [stages for _, _, stages in plans]
                plans += [plan for plan in best if plan[0] <= _MUCH_SLOWER * plans[0][0] and plan[2] not in known]
        if not plans and go_on is not None and not go_on():
            raise ValueError("max_seconds were over before a plan was found")
        if not plans:
            raise self._why_none(problem)
        is_proven = plans[0][1] and self._is_complete
        found = [self._found(is_proven, stages) for _, _, stages in plans]
        return [plan for plan in found if plan is not None]

    def _problem(self) -> "_C.StageProblem":
        num_devices = [hosts * devices for hosts, devices in self._classes]
        submeshes = []
        for shape in self.shapes:
            used = [0] * len(self._classes)
            for kind, hosts, devices in shape.parts:
                used[kind] += hosts * devices
            submeshes.append((used, shape.memory_bytes))
        problem = _C.StageProblem(
            len(self._layers), self._num_microbatches, num_devices, submeshes, self._in_flight[: len(self._layers)]
        )
        of_stretches = StretchTables(self._layers, self._whole)
        tables: dict[int, list[tuple[Sharded, Table]]] = {}
        spaces = list({id(space): space for shape in self.shapes for space in shape.spaces}.values())
        for done, space in enumerate(spaces):
            if tables and not self._on_progress(done, len(spaces)):
                self._is_complete = False
                break
            stages = max(1, self._cluster.num_devices // math.prod(space.shape))
            in_flight = self._in_flight[min(stages, len(self._in_flight)) - 1]
            tables[id(space)] = [
                (way, of_stretches.of(way)) for way in self._ways_of(ShardingGraph(self._whole, space), in_flight)
            ]
        self._on_progress(len(spaces), len(spaces))
        for number, shape in enumerate(self.shapes):
            self._ways[number] = []
            for space in shape.spaces:
                for sharded, (seconds, *held) in tables.get(id(space), []):
                    self._ways[number].append((space, sharded))
                    problem.add_options(number, self._at_least(seconds, shape), *held)
            problem.set_entering(number, [2 * seconds for seconds in self._entering(shape)])
        return problem

    @functools.cached_property
    def _entering_bytes(self) -> list[int]:
        """By layer, of the values that it reads and layers before it make."""
        layer_of = self._layers.layer_of()
        out = []
        for layer, numbers in enumerate(self._layers.numbers):
            read = {value for number in numbers for value in self._layers.forward.operators[number].reads}
            before = (value for value in read if value.maker is not None and layer_of.get(value.maker, layer) < layer)
            out.append(sum(value.num_bytes for value in before))
        return out

    def _entering(self, shape: Shape) -> list[float]:
        """By its first layer the seconds that a stage's values take to it at least, from the stages before it: what
        has whole hosts has them over the network, by all interfaces."""
        hosts = [(kind, count) for kind, count, devices in shape.parts if devices == self._classes[kind][1]]
        is_whole = len(hosts) == len(shape.parts) and self._cluster.num_devices > shape.num_devices
        rate = self._cluster.local_bytes_per_s * shape.num_devices
        if is_whole:
            rate = sum(count * self._cluster.kinds[kind].nic_bytes_per_s for kind, count in hosts)
        latency = self._cluster.latency_s if is_whole else self._cluster.local_latency_s
        return [latency + num_bytes / rate if num_bytes else 0.0 for num_bytes in self._entering_bytes]

    def _at_least(self, seconds: Sequence[float], shape: Shape) -> list[float]:
        """No stage is done with a microbatch sooner than with what it reads."""
        count = len(self._layers)
        entering = self._entering(shape)
        return [max(own, entering[place // count]) for place, own in enumerate(seconds)]

    def _ways_of(self, graph: ShardingGraph, in_flight: int) -> list[Sharded]:
        """Shardings that a limit may need; without one, the fastest."""
        if all(kind.memory_bytes is None for kind in self._cluster.kinds):
            ways = [with_zero(graph.least(), 1)]
        else:
            ways = variants(graph, in_flight)
        self._is_complete = self._is_complete and all(way.is_exact for way in ways)
        return ways

    def _can_be_placed(self, stages: Sequence[tuple[int, int, int, int]]) -> bool:
        return self._placed(stages) is not None

    def _placed(self, stages: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, ...]] | None:
        """The ranks of each stage."""
        placed = _C.place_submeshes(self._classes, [self.shapes[submesh].parts for _, _, submesh, _ in stages])
        if placed is None:
            return None
        hosts = [self._cluster.hosts_of(kind) for kind in self._cluster.kinds]
        return [
            tuple(
                rank for kind, host, first, count in devices for rank in hosts[kind][host].ranks[first : first + count]
            )
            for devices in placed
        ]

    def _found(self, is_proven: bool, stages: Sequence[tuple[int, int, int, int]]) -> FoundPlan | None:
        """With each stage sharded by itself; None where one does not fit then."""
        placed = self._placed(stages)
        assert placed is not None
        out = []
        for number, (first, end, submesh, option) in enumerate(stages):
            shape = self.shapes[submesh]
            in_flight = self._in_flight[len(stages) - number - 1]
            space, _ = self._ways[submesh][option]
            best = self._fitting(first, end, space, in_flight, shape.memory_bytes)
            if best is None:
                return None
            out.append(FoundStage(first, end, shape, placed[number], space, best.sharded, in_flight, best.gap))
        return FoundPlan(tuple(out), is_proven and all(stage.sharded.is_exact for stage in out))

    def refined(self, plan: FoundPlan) -> FoundPlan:
        """The same stages, sharded as cheaply as they can be within the limit, or nearly; the plan itself where they
        are already."""
        if all(stage.gap == 0 for stage in plan.stages):
            return plan
        stages = []
        for stage in plan.stages:
            best = self._fitting(
                stage.first, stage.end, stage.space, stage.in_flight, stage.shape.memory_bytes, _MOST_BRANCHES
            )
            assert best is not None
            stages.append(dataclasses.replace(stage, sharded=best.sharded, gap=best.gap))
        return FoundPlan(tuple(stages), plan.is_proven and all(stage.sharded.is_exact for stage in stages))

    def _fitting(
        self, first: int, end: int, space: Space, in_flight: int, memory_bytes: int, most_branches: int = 0
    ) -> Fitting | None:
        """The cheapest sharding of some layers that fits."""
        if (first, end) not in self._stretches:
            self._stretches[first, end] = Stretch.of(self._layers.forward, self._layers.operators(first, end))
        graphs = self._graphs.setdefault((first, end, id(space)), _Graphs(self._stretches[first, end], space))
        key = (first, end, id(space), in_flight, memory_bytes, most_branches)
        if key not in self._fittings:
            self._fittings[key] = within_limit(graphs, in_flight, memory_bytes, most_branches)
        return self._fittings[key]

    def _why_none(self, problem: "_C.StageProblem") -> NoPlan:
        need = problem.smallest_memory()
        if need is None:
            count = self._cluster.num_devices
            return NoPlan(f"no stages use all {count} devices: there are {len(self._layers)} layers", None)
        num_bytes, stages, largest = need
        first, end, submesh, _ = stages[largest]
        names = f"{self._layers.name(first)} to {self._layers.name(end - 1)}"
        limits = sorted({shape.memory_bytes for shape in self.shapes})
        return NoPlan(
            f"no plan keeps memory_limit_bytes={', '.join(map(str, limits))}: the smallest limit that one keeps is "
            f"{num_bytes}, for stage {largest} of {len(stages)} ({names}) on {self.shapes[submesh]} devices",
            num_bytes,
        )
