"""What the ranks of a pipeline send each other: tensors from placement to placement, sums, and values of Python."""

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torch_xmesh import _C
from torch_xmesh.group import GroupReshards, core_topology
from torch_xmesh.spec import Mesh, core_spec, placement_text
from torch_xmesh.topology import Topology


@dataclasses.dataclass(frozen=True)
class Move:
    """One tensor of a transfer: what it is, and where it is and shall be."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    src: Mesh
    src_placements: tuple[Placement, ...]
    dst: Mesh
    dst_placements: tuple[Placement, ...]

    def key(self) -> tuple[Any, ...]:
        src = tuple(placement_text(p) for p in self.src_placements)
        dst = tuple(placement_text(p) for p in self.dst_placements)
        return (self.shape, self.dtype, self.src, src, self.dst, dst)


@dataclasses.dataclass(frozen=True)
class Planning:
    """How transfers are planned: a strategy in its canonical spelling, and links (None: as discovered, at nominal
    speeds)."""

    strategy: str = "auto"
    topology: Topology | None = None

    @staticmethod
    def of(strategy: object, topology: Topology | None) -> "Planning":
        """Raises ValueError for what is no strategy or no topology."""
        if topology is not None and not isinstance(topology, Topology):
            raise ValueError(f"topology must be an xm.Topology, got {type(topology).__name__}")
        return Planning(_C.canonical_strategy(str(strategy)), topology)

    def __str__(self) -> str:
        return f"{self.strategy}, {'the discovered topology' if self.topology is None else self.topology}"


class Pending:
    """A transfer in flight: ``wait()`` returns this rank's received tensors (empty ones where it receives nothing)."""

    def __init__(self, traffic: "_C.PipelineTraffic", call: "_C.PipelineCall", received: list[torch.Tensor]) -> None:
        self._traffic = traffic
        self._call = call
        self._received = received

    def wait(self) -> list[torch.Tensor]:
        self._traffic.wait(self._call)
        return self._received


_USUAL = Planning()


class Transfers:
    """All that moves in one pipeline. Every transfer is made by all ranks that it concerns, in one order per lane; a
    failure of one rank ends those of all."""

    def __init__(self, reshards: GroupReshards, ranks: Sequence[int]) -> None:
        self.ranks = tuple(sorted(ranks))
        self.everyone = Mesh(list(self.ranks))
        self.rank = reshards.core.global_rank
        self._core = reshards.core
        self.traffic = _C.PipelineTraffic(reshards.core, list(self.ranks))
        self._plans: dict[Any, _C.PreparedPlan] = {}
        self._topologies: dict[tuple[tuple[int, ...], Topology | None], _C.Topology] = {}
        self._counts: dict[str, int] = {}

    def prepare(self, moves: Sequence[Move], planning: Planning = _USUAL) -> "_C.PreparedPlan":
        """The plan of a transfer, made once for equal moves. This rank must be on one of the meshes."""
        key = (planning, *(move.key() for move in moves))
        if key not in self._plans:
            self._plans[key] = self.make(moves, planning)
        return self._plans[key]

    def make(self, moves: Sequence[Move], planning: Planning = _USUAL) -> "_C.PreparedPlan":
        """As :meth:`prepare`, for the caller to keep."""
        return self._core.prepare(self.plan(moves, planning), "0" * len(moves), False)

    def plan(self, moves: Sequence[Move], planning: Planning = _USUAL) -> "_C.ReshardingPlan":
        """What any ranks move."""
        ranks = tuple(sorted({rank for move in moves for rank in (*move.src.ranks, *move.dst.ranks)}))
        pairs = [
            (
                core_spec(move.shape, move.dtype, move.src, move.src_placements),
                core_spec(move.shape, move.dtype, move.dst, move.dst_placements),
            )
            for move in moves
        ]
        return _C.plan_resharding(pairs, self.topology(ranks, planning.topology), planning.strategy)

    def topology(self, ranks: Sequence[int], given: Topology | None) -> "_C.Topology":
        """Hosts and links of some ranks, as given, else as discovered. Raises ValueError where `given` lacks a rank."""
        key = (tuple(ranks), given)
        if key not in self._topologies:
            self._topologies[key] = core_topology(self._core, list(ranks), given)
        return self._topologies[key]

    def start(self, lane: str, moves: Sequence[Move], tensors: Sequence[torch.Tensor] = ()) -> Pending:
        """Starts a transfer; `tensors` are this rank's local ones where it is on the source meshes."""
        count = self._counts.get(lane, 0)
        self._counts[lane] = count + 1
        shapes = [
            core_spec(move.shape, move.dtype, move.dst, move.dst_placements).local_shape(self.rank) for move in moves
        ]
        received = [
            torch.empty(shape if shape is not None else [0], dtype=move.dtype)
            for shape, move in zip(shapes, moves, strict=True)
        ]
        call = self.traffic.begin(lane, count, self.prepare(moves), list(tensors), received)
        return Pending(self.traffic, call, received)

    def sum(self, lane: str, tensor: torch.Tensor, mesh: Mesh | None = None) -> torch.Tensor:
        """The sum of a tensor (equal shapes) over a one-axis mesh, by default all ranks; bitwise equal on all."""
        mesh = mesh or self.everyone
        shape = tuple(tensor.shape)
        if len(mesh.ranks) > 2 and tensor.dim() == 1 and tensor.numel() >= 4096:
            parts = Move(shape, tensor.dtype, mesh, (Partial("sum"),), mesh, (Shard(0),))
            part = self.start(lane, [parts], [tensor]).wait()
            whole = Move(shape, tensor.dtype, mesh, (Shard(0),), mesh, (Replicate(),))
            return self.start(f"{lane}/gather", [whole], part).wait()[0]
        return self.start(
            lane, [Move(shape, tensor.dtype, mesh, (Partial("sum"),), mesh, (Replicate(),))], [tensor]
        ).wait()[0]

    def broadcast(self, lane: str, root: int, value: Any) -> Any:
        """A picklable value of rank `root` on every rank."""
        source, everywhere = Mesh([root]), (Replicate(),)
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) if self.rank == root else None
        size = torch.tensor([0 if payload is None else payload.numel()])
        length = self.start(
            lane, [Move((1,), torch.int64, source, everywhere, self.everyone, everywhere)], [size]
        ).wait()
        move = Move((int(length[0]),), torch.uint8, source, everywhere, self.everyone, everywhere)
        received = self.start(f"{lane}/bytes", [move], [] if payload is None else [payload]).wait()[0]
        return pickle.loads(received.numpy().tobytes())

    def gather(self, lane: str, value: Any) -> list[Any]:
        """A picklable value of every rank, in rank order, on every rank."""
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        mine = torch.zeros(len(self.ranks), dtype=torch.int64)
        mine[self.ranks.index(self.rank)] = payload.numel()
        lengths = self.sum(f"{lane}/lengths", mine).tolist()
        moves = [
            Move((length,), torch.uint8, Mesh([rank]), (Replicate(),), self.everyone, (Replicate(),))
            for length, rank in zip(lengths, self.ranks, strict=True)
        ]
        received = self.start(f"{lane}/bytes", moves, [payload] * len(moves)).wait()
        return [pickle.loads(part.numpy().tobytes()) for part in received]
