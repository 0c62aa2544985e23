"""Reshards of an accelerator's tensors against the backend that carries them: sends, broadcasts, packing. Pipelines on
it against pipelines on cpu.

    python benchmarks/device_perf.py --device cuda --ranks 2

Each comparison alternates block by block in the same processes, and carries the rival against itself: the spread that
the machine alone makes. A block ends when the device is done; its results are compared element by element.

  send        Shard(0) on one rank to Shard(0) on another, beside one isend and irecv of the same bytes
  columns     Shard(1) to Shard(0) of another shape of the same bytes, which is packed, beside that isend and irecv
  broadcast   one rank to all others, by chunked broadcasts, beside one broadcast of the same bytes
  copy        a strided box on one rank, by the kernels, beside torch's copy of as many contiguous bytes
  boundary    of two ranks: a value from stage to stage of a pipeline, through host memory, beside a pipeline on cpu,
              with a copy to the host before and one to the device behind
  action      of two ranks: CPU time of the calling thread that the engine needs for an action, without what the
              stage's own operators need, beside the same on cpu

Ranks that are more than the devices share them. NCCL then takes each for a host of its own.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parts.device import pipelines
from parts.device.blocks import CONTROL, OURS, RIVAL, Block, Record, compared
from parts.shared.harness import MeasurementError, job_of_arguments, launch, machine_notes, publish, save
from parts.shared.progress import Listener
from parts.shared.table import LiveTable
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_xmesh as xm
from torch_xmesh.testing.cluster import EmulatedCluster

_TIMEOUT_SECONDS = 300.0
_HEAD = (
    *(("case", ""), ("method", ""), ("size", "(MiB)"), ("time", "(ms)"), ("min", "(ms)"), ("max", "(ms)")),
    *(("rate", "(GB/s)"), ("of rival", ""), ("runs", ""), ("#wrong", "")),
)
CASES = ("send", "columns", "broadcast", "copy", "boundary", "action")


def whole_of(num_bytes: int, columns: int) -> torch.Tensor:
    """Every element tells where it belongs; int32."""
    return torch.arange(num_bytes // 4, dtype=torch.int32).reshape(-1, columns)


def dtensor(local: torch.Tensor, shape: torch.Size, mesh: xm.Mesh, placement: Any) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, xm.device_mesh(mesh, local.device.type), [placement], run_check=False, shape=shape, stride=stride
    )


class Worker:
    """One rank of all measurements."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.kind: str = job["device"]
        self.device = torch.device(self.kind, torch.accelerator.current_device_index())

    def mesh(self, *ranks: int) -> xm.Mesh:
        return xm.Mesh(list(ranks), device_type=self.kind)

    def compare(self, case: str, num_bytes: int, blocks: dict[str, Block]) -> None:
        """By turns."""
        found = compared(case, num_bytes, blocks, runs=self.job["runs"], repeats=self.job["repeats"])
        publish(self.job, [record.to_json() for record in found])

    def move(self, case: str, num_bytes: int, columns: int, src: Any, dst: Any) -> None:
        """From rank 0 to rank 1, beside the bytes alone."""
        whole = whole_of(num_bytes, columns)
        raw = whole.to(self.device) if self.rank == 0 else torch.empty_like(whole, device=self.device)

        def send() -> None:
            if self.rank < 2:
                work = dist.isend(raw, 1) if self.rank == 0 else dist.irecv(raw, 0)
                assert work is not None
                work.wait()

        run, out = self._reshard(whole, self.mesh(0), src, self.mesh(1), dst, "auto")
        is_target = self.rank == 1
        rival = Block(send, lambda: raw if is_target else None, whole if is_target else None)
        self.compare(case, num_bytes, {RIVAL: rival, OURS: Block(run, *out), CONTROL: rival})

    def _reshard(
        self, whole: torch.Tensor, source: xm.Mesh, src: Any, target: xm.Mesh, dst: Any, strategy: Any
    ) -> tuple[Callable[[], object], tuple[Callable[[], torch.Tensor | None], torch.Tensor | None]]:
        """Into memory that is kept. On several targets dst is Replicate()."""
        x: Any = xm.Spec(whole.shape, whole.dtype, source, [src])
        if self.rank in source.ranks:
            x = dtensor(whole.to(self.device), whole.shape, source, src)
        if self.rank not in (*source.ranks, *target.ranks):
            return lambda: None, (lambda: None, None)
        is_target = self.rank in target.ranks
        local = torch.empty_like(whole, device=self.device) if is_target else torch.empty(0, 0, dtype=whole.dtype)
        out = dtensor(local.to(self.device), whole.shape, target, dst)
        wanted = whole if is_target else None
        return (
            lambda: xm.reshard(x, target, [dst], out=out, strategy=strategy),
            (lambda: out.to_local() if is_target else None, wanted),
        )

    def broadcast(self, num_bytes: int) -> None:
        whole = whole_of(num_bytes, 1024)
        raw = whole.to(self.device) if self.rank == 0 else torch.empty_like(whole, device=self.device)
        wanted = whole if self.rank > 0 else None
        rival = Block(lambda: dist.broadcast(raw, 0), lambda: raw if self.rank > 0 else None, wanted)
        target = self.mesh(*range(1, self.size))
        strategy = xm.Broadcast(collective=True)
        run, out = self._reshard(whole, self.mesh(0), Replicate(), target, Replicate(), strategy)
        self.compare("broadcast", num_bytes, {RIVAL: rival, OURS: Block(run, *out), CONTROL: rival})

    def copy(self, num_bytes: int) -> None:
        """Every rank copies; columns [0, n) of a matrix that is twice as wide."""
        whole = whole_of(num_bytes, 1024)
        mesh = self.mesh(self.rank)
        wide = torch.zeros(whole.shape[0], 2 * whole.shape[1], dtype=whole.dtype, device=self.device)
        wide[:, : whole.shape[1]] = whole.to(self.device)
        x = dtensor(wide[:, : whole.shape[1]], whole.shape, mesh, Shard(0))
        local = torch.empty_like(whole, device=self.device)
        out = dtensor(local, whole.shape, mesh, Shard(0))
        dense, copied = whole.to(self.device), torch.empty_like(local)
        rival = Block(lambda: copied.copy_(dense), lambda: copied, whole)
        ours = Block(lambda: xm.reshard(x, mesh, [Shard(0)], out=out), out.to_local, whole)
        self.compare("copy", num_bytes, {RIVAL: rival, OURS: ours, CONTROL: rival})

    def all(self) -> None:
        num_bytes = self.job["num_bytes"]
        self.copy(num_bytes)
        if self.size > 1:
            self.move("send", num_bytes, 1024, Shard(0), Shard(0))
            self.move("columns", num_bytes, 1024, Shard(1), Shard(0))
            self.broadcast(num_bytes)
        if self.size == 2:
            runs, repeats = self.job["runs"], self.job["repeats"]
            for found in (
                pipelines.boundary(self.device, num_bytes, runs=runs, repeats=repeats),
                pipelines.action(self.device, runs=runs),
            ):
                publish(self.job, [record.to_json() for record in found])


def work(job: dict[str, Any]) -> None:
    for module in job["load"]:
        importlib.import_module(module)
    if torch.accelerator.device_count() < int(os.environ["WORLD_SIZE"]):
        os.environ.setdefault("NCCL_HOSTID", os.environ["RANK"])
    torch.accelerator.set_device_index(int(os.environ["RANK"]) % torch.accelerator.device_count())
    options = xm.Options()
    options.inner = dict(job["inner"])
    dist.init_process_group(f"cpu:xmesh,{job['device']}:xmesh", pg_options=options)
    Worker(job).all()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="the kind of device (default: %(default)s)")
    parser.add_argument("--inner", help="the c10d backend that carries it (default: cuda's is nccl)")
    parser.add_argument("--load", action="append", default=[], help="a module to import first, which registers these")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--num-bytes", type=int, default=256 << 20, help="of each tensor (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=7, help="blocks of each method (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="operations in a block (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where to write the records")
    options = parser.parse_args()
    if options.device == "cuda" and torch.cuda.device_count() == 0:
        parser.error(
            f"--device cuda needs a GPU, here is none (torch {torch.__version__}: torch.cuda.device_count() is 0)"
        )
    inner = {} if options.inner is None else {options.device: options.inner}
    table = LiveTable(_HEAD, (CASES, (RIVAL, OURS, CONTROL)))
    name = torch.cuda.get_device_name(0) if options.device == "cuda" else options.device
    notes = [*machine_notes(), f"{options.ranks} ranks on {name}", *str(xm.about()).splitlines()]
    table.begin(notes)
    listener = Listener(lambda rows: table.rows([Record(**row).cells() for row in rows]))
    job = {key: getattr(options, key) for key in ("device", "load", "num_bytes", "runs", "repeats")} | {"inner": inner}
    try:
        with EmulatedCluster(hosts=1, devices=options.ranks, rate=None, output=listener.stream) as cluster:
            done = launch(cluster, listener, Path(__file__), job, _TIMEOUT_SECONDS)
    except MeasurementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    wrong = sum(record["wrong"] for record in done.records)
    table.note(f"#wrong over all rows: {wrong}")
    if options.json is not None:
        save(options.json, done.records, {"suite": "device", "machine": notes, "options": json.loads(json.dumps(job))})
    return int(wrong > 0)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].endswith("job.json"):
        work(job_of_arguments())
    else:
        sys.exit(main())
