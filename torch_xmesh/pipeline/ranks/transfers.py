"""What the ranks of a pipeline send each other: tensors from placement to placement, sums, and values of Python."""

import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

from torch_xmesh import _C
from torch_xmesh.errors import PeerError
from torch_xmesh.group import GroupReshards
from torch_xmesh.plan_cache import Move, PlanOptions, PlanRequest, Prepared
from torch_xmesh.spec import Mesh


class Pending:
    """A transfer in flight: ``wait()`` returns this rank's received tensors (empty ones where it receives nothing)."""

    def __init__(self, traffic: "_C.PipelineTraffic", call: "_C.PipelineCall", received: list[torch.Tensor]) -> None:
        self._traffic = traffic
        self._call = call
        self._received = received

    def wait(self) -> list[torch.Tensor]:
        self._traffic.wait(self._call)
        return self._received


_USUAL = PlanOptions()


def _of_participant(prepared: Prepared) -> "_C.PreparedPlan":
    assert prepared.core is not None, "a transfer is prepared by the ranks of its meshes"
    return prepared.core


def _pickled(value: Any) -> torch.Tensor:
    """Bytes that pickle.loads reads, and zeros after them up to a power of two or some MiB: few lengths are few
    plans."""
    found = pickle.dumps(value)
    power, mib = max(64, 1 << (len(found) - 1).bit_length()), 1 << 20
    out = torch.zeros(power if power <= mib else -(-len(found) // mib) * mib, dtype=torch.uint8, device="cpu")
    out[: len(found)] = torch.frombuffer(bytearray(found), dtype=torch.uint8)
    return out


class Transfers:
    """All that moves in one pipeline. Every transfer is made by all ranks that it concerns, in one order per lane; a
    failure of one rank ends those of all."""

    def __init__(self, reshards: GroupReshards, ranks: Sequence[int]) -> None:
        self.ranks = tuple(sorted(ranks))
        self.everyone = Mesh(list(self.ranks))
        self.rank = reshards.core.global_rank
        self.plans = reshards.plans
        self.traffic = _C.PipelineTraffic(reshards.core, list(self.ranks))
        self._reshards = reshards
        self._counts: dict[str, int] = {}

    def __deepcopy__(self, memo: Any) -> "Transfers":
        return self  # a copy of a stage is of the same pipeline

    @property
    def timeout(self) -> timedelta:
        """The group's timeout."""
        return self._reshards.core.timeout

    def raise_cause(self, error: Exception) -> None:
        """Raises what the pipeline has failed with, where a collective has failed on this rank with `error` because
        another rank has died, stopped or failed."""
        self.traffic.check()
        if isinstance(error, PeerError | dist.DistNetworkError | dist.DistBackendError):
            self.traffic.await_cause(suspects=not isinstance(error, PeerError))

    def prepare(self, moves: Sequence[Move], plan_options: PlanOptions = _USUAL) -> "_C.PreparedPlan":
        """The plan of a transfer. This rank must be on one of the meshes."""
        return _of_participant(self._prepare(moves, plan_options))

    def _prepare(self, moves: Sequence[Move], plan_options: PlanOptions) -> Prepared:
        """Through host memory: a device's own line takes calls in an order that their ranks agree on one by one, and
        transfers do not."""
        return self.plans.prepare(PlanRequest(tuple(moves), plan_options, through_host=True))

    def start(self, lane: str, moves: Sequence[Move], tensors: Sequence[torch.Tensor] = ()) -> Pending:
        """Starts a transfer; `tensors` are this rank's local ones where it is on the source meshes."""
        count = self._counts.get(lane, 0)
        self._counts[lane] = count + 1
        prepared = self._prepare(moves, _USUAL)
        received = [move.empty_result(shape) for move, shape in zip(moves, prepared.dst_shapes, strict=True)]
        call = self.traffic.begin(lane, count, _of_participant(prepared), list(tensors), received)
        return Pending(self.traffic, call, received)

    def sum(self, lane: str, tensor: torch.Tensor, mesh: Mesh | None = None) -> torch.Tensor:
        """The sum of a tensor (equal shapes) over a one-axis mesh, by default all ranks; bitwise equal on all."""
        mesh = Mesh(mesh or self.everyone, device_type=tensor.device.type)
        shape = tuple(tensor.shape)
        if len(mesh.ranks) > 2 and tensor.dim() == 1 and tensor.numel() >= 4096:
            parts = Move.of(shape, tensor.dtype, (mesh, [Partial("sum")]), (mesh, [Shard(0)]))
            part = self.start(lane, [parts], [tensor]).wait()
            whole = Move.of(shape, tensor.dtype, (mesh, [Shard(0)]), (mesh, [Replicate()]))
            return self.start(f"{lane}/gather", [whole], part).wait()[0]
        total = Move.of(shape, tensor.dtype, (mesh, [Partial("sum")]), (mesh, [Replicate()]))
        return self.start(lane, [total], [tensor]).wait()[0]

    def broadcast(self, lane: str, root: int, value: Any) -> Any:
        """A picklable value of rank `root` on every rank."""
        source, target = (Mesh([root]), [Replicate()]), (self.everyone, [Replicate()])
        payload = _pickled(value) if self.rank == root else None
        size = torch.tensor([0 if payload is None else payload.numel()], device="cpu")
        length = self.start(lane, [Move.of((1,), torch.int64, source, target)], [size]).wait()
        move = Move.of((int(length[0]),), torch.uint8, source, target)
        received = self.start(f"{lane}/bytes", [move], [] if payload is None else [payload]).wait()[0]
        return pickle.loads(received.numpy().tobytes())

    def gather(self, lane: str, value: Any) -> list[Any]:
        """A picklable value of every rank, in rank order, on every rank."""
        payload = _pickled(value)
        mine = torch.zeros(len(self.ranks), dtype=torch.int64, device="cpu")
        mine[self.ranks.index(self.rank)] = payload.numel()
        lengths = self.sum(f"{lane}/lengths", mine).tolist()
        moves = [
            Move.of((length,), torch.uint8, (Mesh([rank]), [Replicate()]), (self.everyone, [Replicate()]))
            for length, rank in zip(lengths, self.ranks, strict=True)
        ]
        received = self.start(f"{lane}/bytes", moves, [payload] * len(moves)).wait()
        return [pickle.loads(part.numpy().tobytes()) for part in received]
