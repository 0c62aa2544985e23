"""A rank that measures: the same collective by gloo and as a reshard on one mesh, in turns."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from parts.collectives.records import Record
from parts.shared.harness import job_of_arguments, publish
from parts.shared.progress import tell

GLOO, OURS, CONTROL = "gloo", "xmesh", "gloo_control"
_MOST_REPEATS, _BLOCK_BYTES = 20, 4 << 20
"""Collectives that are timed together: so many, or as many as move so many bytes."""
METHODS = (GLOO, OURS, CONTROL)
PLACEMENTS: dict[str, tuple[Placement, Placement]] = {
    "all_reduce": (Partial(), Replicate()),
    "reduce_scatter": (Partial(), Shard(0)),
    "all_gather": (Shard(0), Replicate()),
    "all_to_all": (Shard(0), Shard(1)),
}
"""By collective, how the value lies on the mesh before and afterwards."""


class Collective:
    """One collective on one size: `world` x `world` blocks of small whole numbers, exact in float32 in any order."""

    def __init__(self, name: str, num_bytes: int, group: dist.ProcessGroup) -> None:
        self.name, self._group = name, group
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        before, after = PLACEMENTS[name]
        rows = self._size
        columns = max(num_bytes // 4 // rows // rows, 1) * rows
        self.num_bytes = 4 * rows * columns
        whole = (torch.arange(rows * columns) % 97).float().view(rows, columns)
        summed = whole * self._size + sum(range(self._size)) if isinstance(before, Partial) else whole
        self._source = whole + self._rank if isinstance(before, Partial) else self._part(whole, before)
        self._wanted = self._part(summed, after)
        mesh = DeviceMesh("cpu", torch.arange(self._size), _init_backend=False)
        self._x = DTensor.from_local(self._source, mesh, [before], run_check=False)
        self._mesh, self._after = mesh, [after]
        self.repeats = max(1, min(_MOST_REPEATS, _BLOCK_BYTES // self.num_bytes))
        self._buffers = [self._source.clone() for _ in range(self.repeats)]
        self._out = torch.empty_like(self._wanted)
        self._made: torch.Tensor | None = None

    def _part(self, whole: torch.Tensor, placement: Placement) -> torch.Tensor:
        if not isinstance(placement, Shard):
            return whole
        return whole.chunk(self._size, placement.dim)[self._rank].contiguous()

    def prepare(self) -> None:
        """Before the clock starts: no result, and inputs for what works in place."""
        for buffer in self._buffers:
            buffer.copy_(self._source)
        self._out.fill_(-1)
        self._made = None

    def by_reshard(self, number: int) -> None:
        import torch_xmesh as xm

        self._made = xm.reshard(self._x, self._mesh, self._after).to_local()

    def by_gloo(self, number: int) -> None:
        if self.name == "all_reduce":
            dist.all_reduce(self._buffers[number], group=self._group)
            self._made = self._buffers[number]
        elif self.name == "reduce_scatter":
            dist.reduce_scatter_tensor(self._out, self._source, group=self._group)
            self._made = self._out
        elif self.name == "all_gather":
            dist.all_gather_into_tensor(self._out, self._source, group=self._group)
            self._made = self._out
        else:  # the columns of each go together, as the collective wants them
            sent = torch.cat(self._source.chunk(self._size, 1))
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=self._group)
            self._made = received

    def num_wrong(self) -> int:
        if self._made is None or self._made.shape != self._wanted.shape:
            return self._wanted.numel()
        return int((self._made != self._wanted).sum())


def _timed(run: Callable[[int], None], collective: Collective, group: dist.ProcessGroup) -> tuple[float, int]:
    """Seconds of one, from the first start to the last end, and wrong elements, of all ranks."""
    collective.prepare()
    dist.barrier(group=group)
    start = time.monotonic()
    for number in range(collective.repeats):
        run(number)
    mine = torch.tensor([start, time.monotonic(), collective.num_wrong()], dtype=torch.float64)
    everyone = torch.empty(dist.get_world_size(), 3, dtype=torch.float64)
    dist.all_gather(list(everyone.unbind(0)), mine, group=group)
    return float(everyone[:, 1].max() - everyone[:, 0].min()) / collective.repeats, int(everyone[:, 2].sum())


def _measured(collective: Collective, runs: int, group: dist.ProcessGroup, seconds_left: float) -> list[Record]:
    """One uncounted round, then `runs` rounds of all methods."""
    methods = {GLOO: collective.by_gloo, OURS: collective.by_reshard, CONTROL: collective.by_gloo}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    wrong = dict.fromkeys(methods, 0)
    for number in range(runs + 1):
        for name, run in methods.items():
            if dist.get_rank() == 0 and number == 0:
                tell(collective.name, name, f"{runs} runs", seconds_left)
            took, bad = _timed(run, collective, group)
            wrong[name] += bad
            if number:
                seconds[name].append(took)
    rival = statistics.median(seconds[GLOO])
    return [_record(collective, name, seconds[name], wrong[name], rival) for name in methods]


def _record(collective: Collective, name: str, seconds: Sequence[float], wrong: int, rival: float) -> Record:
    median = statistics.median(seconds)
    return Record(
        collective=collective.name,
        method=name,
        num_bytes=collective.num_bytes,
        seconds=median,
        seconds_min=min(seconds),
        seconds_max=max(seconds),
        ratio=median / rival,
        repeats=collective.repeats,
        runs=len(seconds),
        wrong=wrong,
    )


def _worker(job: dict[str, Any]) -> None:
    import torch_xmesh  # noqa: F401

    began = time.monotonic()
    dist.init_process_group("xmesh")
    group = dist.new_group(backend="gloo")
    for name in job["collectives"]:
        for num_bytes in job["sizes"]:
            left = job["seconds"] - (time.monotonic() - began)
            found = _measured(Collective(name, num_bytes, group), job["runs"], group, left)
            publish(job, [record.to_json() for record in found])
    dist.destroy_process_group()


if __name__ == "__main__":
    _worker(job_of_arguments())
