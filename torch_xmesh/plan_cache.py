"""The one door to plans of reshards: specs, a strategy and a topology, in a normal form, become a plan; equal ones
once."""

import dataclasses
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

import torch
from torch.distributed.tensor import Placement

from torch_xmesh import _C
from torch_xmesh.spec import AnyMesh, Spec, device_type_of, empty_local, mesh_grid
from torch_xmesh.topology import Topology

MAX_PLANS = 4096
"""How many prepared plans are kept for one process group; the least recently used is dropped first."""

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class RecentlyUsed(Generic[Key, Value]):
    """A dict whose entries weigh at most so much together: the least recently used one goes first. Any thread."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._weight = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        """The least recently used key first."""
        return iter(self._entries)

    def get(self, key: Key) -> Value | None:
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
            return found[0]

    def put(self, key: Key, value: Value, weight: int = 1) -> None:
        with self._lock:
            self._weight += weight - self._entries.pop(key, (None, 0))[1]
            self._entries[key] = value, weight
            while self._weight > self.most and len(self._entries) > 1:
                self._weight -= self._entries.popitem(last=False)[1][1]


_canonical = functools.lru_cache(maxsize=256)(_C.canonical_strategy)

Placed = tuple[AnyMesh, Sequence[Placement]]
"""A mesh, and one placement per axis of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """One tensor: where it is, and where it shall be."""

    src: Spec
    dst: Spec
    src_device: str = dataclasses.field(init=False)
    """The kind of device that the tensor is on: what its mesh says, or else the other one, or else "cpu"."""
    dst_device: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        src, dst = device_type_of(self.src.mesh), device_type_of(self.dst.mesh)
        object.__setattr__(self, "src_device", src or dst or "cpu")
        object.__setattr__(self, "dst_device", dst or src or "cpu")

    def empty_result(self, local_shape: Sequence[int] | None) -> torch.Tensor:
        """Memory for this rank's part of the result; of a rank that has none, an empty tensor."""
        if local_shape is None:
            return empty_local(self.dst.shape, self.dst.dtype, self.dst_device)
        return torch.empty(local_shape, dtype=self.dst.dtype, device=self.dst_device)

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype, src: Placed, dst: Placed) -> "Move":
        """A plain tensor's; placements in normal form. What does not fit is found when it is planned."""
        size = torch.Size(shape)
        return Move(*(Spec.unchecked(size, dtype, mesh, tuple(placements)) for mesh, placements in (src, dst)))


@dataclasses.dataclass(frozen=True, slots=True)
class PlanOptions:
    """How moves are planned: a strategy in its canonical spelling, and links (None: as discovered, at nominal
    speeds)."""

    strategy: str = "auto"
    topology: Topology | None = None

    @staticmethod
    def of(strategy: object, topology: Topology | None) -> "PlanOptions":
        """Raises ValueError for what is no strategy or no topology."""
        if topology is not None and not isinstance(topology, Topology):
            raise ValueError(f"topology must be an xm.Topology, got {type(topology).__name__}")
        return PlanOptions(_canonical(str(strategy)), topology)

    def __str__(self) -> str:
        return f"{self.strategy}, {'the discovered topology' if self.topology is None else self.topology}"


@dataclasses.dataclass(frozen=True, slots=True)
class PlanRequest:
    """What ranks plan and agree on for one call; equal ones share a plan.

    Attributes:
        is_backward: it is the backward of another call.
        labels: one name per move; empty: by number.
        entries: what ranks compare besides, before the moves.
        through_host: host memory carries the tensors, whatever they are on.
    """

    moves: tuple[Move, ...]
    plan_options: PlanOptions
    is_backward: bool = False
    labels: tuple[str, ...] = ()
    entries: tuple[tuple[str, str], ...] = ()
    through_host: bool = False

    def ranks(self) -> list[int]:
        """Those of any mesh, ascending."""
        return ranks_of(self.moves)

    def label(self, index: int) -> str:
        """The name of a tensor for error texts."""
        return self.labels[index] if self.labels else str(index)

    def devices(self) -> frozenset[str]:
        """The kinds of devices that its tensors are on."""
        return frozenset(kind for move in self.moves for kind in (move.src_device, move.dst_device))


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """What equal calls share on this rank.

    Attributes:
        core: None on a rank of neither mesh.
        dst_shapes: this rank's local shape of each result, None where it has none.
    """

    core: "_C.PreparedPlan | None"
    dst_shapes: tuple[list[int] | None, ...]


def ranks_of(moves: Sequence[Move]) -> list[int]:
    """Those of any mesh of these moves, ascending."""
    meshes = {mesh_grid(spec.mesh) for move in moves for spec in (move.src, move.dst)}
    return sorted({rank for mesh in meshes for rank in mesh.ranks})


def plan_of(moves: Sequence[Move], strategy: str, topology: "_C.Topology") -> "_C.ReshardingPlan":
    """ValueError for what no plan serves."""
    return _C.plan_resharding([(move.src.to_core(), move.dst.to_core()) for move in moves], topology, strategy)


def topology_of(
    ranks: Sequence[int], given: Topology | None, discover: Callable[[list[int], "_C.LinkModel"], "_C.Topology"]
) -> "_C.Topology":
    """Hosts and links of `ranks`: as given, and as discovered where nothing is said of them."""
    if given is not None and given.knows_hosts:
        return given.to_core(list(ranks))
    discovered = discover(list(ranks), (given or Topology()).links)
    return discovered if given is None else given.to_core(list(ranks), discovered)


class Plans:
    """The plans of one process group on this rank. Any thread."""

    def __init__(self, ranks: frozenset[int], core: "Callable[[], _C.ReshardGroup]") -> None:
        self._ranks = ranks
        self._core = core
        self.prepared: RecentlyUsed[PlanRequest, Prepared] = RecentlyUsed(MAX_PLANS)

    def topology(self, ranks: Sequence[int], given: Topology | None) -> "_C.Topology":
        """ValueError where `given` lacks a rank."""
        return topology_of(ranks, given, self._core().topology)

    def plan(self, moves: Sequence[Move], plan_options: PlanOptions) -> "_C.ReshardingPlan":
        """What any ranks move; not kept."""
        return plan_of(moves, plan_options.strategy, self.topology(ranks_of(moves), plan_options.topology))

    def prepare(self, request: PlanRequest) -> Prepared:
        """Planned once for equal requests. ValueError for those that no plan serves."""
        known = self.prepared.get(request)
        if known is None:
            known = self._make(request)
            self.prepared.put(request, known)
        return known

    def _make(self, request: PlanRequest) -> Prepared:
        targets = [move.dst.to_core() for move in request.moves]
        ranks = request.ranks()
        strangers = [rank for rank in ranks if rank not in self._ranks]
        if strangers:
            raise ValueError(
                f"rank {strangers[0]} of a mesh is not in the process group, which has {len(self._ranks)} ranks"
            )
        group = self._core()
        core = None
        if group.global_rank in ranks:
            requires_grad = "".join("1" if move.src.requires_grad else "0" for move in request.moves)
            plan = self.plan(request.moves, request.plan_options)
            devices = [(move.src_device, move.dst_device) for move in request.moves]
            core = group.prepare(
                plan,
                requires_grad,
                request.is_backward,
                request.labels,
                request.entries,
                devices,
                through_host=request.through_host,
            )
        return Prepared(core, tuple(target.local_shape(group.global_rank) for target in targets))
