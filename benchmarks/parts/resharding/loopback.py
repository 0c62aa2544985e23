"""The product against raw gloo on two local ranks: a large reshard's rate, and what a tiny one costs that has been
called before, alone and a thousand in one call.

Every comparison alternates block by block in the same two processes and carries `gloo_control`, gloo against itself:
the spread that the machine alone makes. Records use gloo's median time as `bound_seconds`.
"""

import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from parts.resharding.cases import S0, Case, TensorLayout
from parts.resharding.methods import RankData, XmeshMethod, placement
from parts.resharding.records import Record, cells
from parts.shared.harness import Measurement, job_of_arguments, launch, machine_notes, publish, wrong_note
from parts.shared.progress import Listener, tell
from parts.shared.table import LiveTable
from torch_xmesh.testing.cluster import EmulatedCluster

_TIMEOUT_SECONDS = 420.0
_ALL_REDUCE_REPEATS = 1000
_SMALL_REPEATS = 500
_MANY, _MANY_REPEATS = 1000, 20
RIVAL, CONTROL, OURS, OURS_OUT, OURS_CPP = "gloo", "gloo_control", "xmesh", "xmesh_out", "xmesh_cpp"
METHODS = (RIVAL, OURS, OURS_OUT, OURS_CPP, CONTROL)
CASES = ("reshard-large", "reshard-4B", "reshard_many-1000", "all_reduce-4B")

Block = Callable[[], None]


def measure(*, num_bytes: int, runs: int, live: LiveTable, shared_memory: bool = True) -> Measurement[Record]:
    """Runs the three comparisons; rows go into `live` as they are measured. Raises MeasurementError when a rank
    fails."""
    cluster_note = "2 ranks on loopback" + ("" if shared_memory else ", sharing no memory")
    live.begin([*machine_notes(), cluster_note, "bound = gloo's median; cpu = both ranks, per operation"])
    listener = Listener(lambda rows: live.rows([cells(Record(**row)) for row in rows]))
    job = {"num_bytes": num_bytes, "runs": runs, "shared_memory": shared_memory}
    with EmulatedCluster(hosts=1, devices=2, rate=None, output=listener.stream) as cluster:
        done = launch(cluster, listener, Path(__file__), job, _TIMEOUT_SECONDS)
    records = [Record(**record) for record in done.records]
    live.note(wrong_note(records))
    return Measurement(records, {"machine": machine_notes(), "cluster": cluster_note, "runs": runs})


class _Comparison:
    """Named blocks that are run in turn; a block is `repeats` operations."""

    def __init__(self, case: str, num_bytes: int, repeats: int, blocks: dict[str, Block]) -> None:
        self._case = case
        self._num_bytes = num_bytes
        self._repeats = repeats
        self._blocks = blocks

    def run(self, runs: int, group: dist.ProcessGroup, count_wrong: Callable[[], int]) -> list[Record]:
        """One uncounted round, then `runs` rounds; wrong elements are counted after every block."""
        seconds: dict[str, list[float]] = {name: [] for name in self._blocks}
        cpu: dict[str, list[float]] = {name: [] for name in self._blocks}
        wrong = dict.fromkeys(self._blocks, 0)
        began = time.monotonic()
        for round_index in range(runs + 1):
            for name, block in self._blocks.items():
                if dist.get_rank() == 0:
                    tell(
                        self._case, name, f"round {round_index} of {runs}", began + _TIMEOUT_SECONDS - time.monotonic()
                    )
                took, used, bad = _time_block(block, group, count_wrong)
                wrong[name] += bad
                if round_index > 0:
                    seconds[name].append(took / self._repeats)
                    cpu[name].append(used / self._repeats)
        gloo = statistics.median(seconds[RIVAL])
        return [self._record(name, seconds[name], cpu[name], wrong[name], gloo) for name in self._blocks]

    def _record(self, name: str, seconds: list[float], cpu: list[float], wrong: int, gloo: float) -> Record:
        return Record(
            case=self._case,
            strategy=name,
            num_bytes=self._num_bytes,
            seconds=statistics.median(seconds),
            seconds_min=min(seconds),
            seconds_max=max(seconds),
            bound_seconds=gloo,
            ratio=statistics.median(seconds) / gloo,
            predicted_seconds=None,
            num_messages=1,
            wrong=wrong,
            runs=len(seconds),
            cpu_seconds=statistics.median(cpu),
        )


def _time_block(block: Block, group: dist.ProcessGroup, count_wrong: Callable[[], int]) -> tuple[float, float, int]:
    """Time from the first start to the last end, CPU seconds of both ranks, wrong elements of both ranks."""
    dist.barrier(group=group)
    cpu = _cpu_seconds()
    start = time.monotonic()
    block()
    end = time.monotonic()
    mine = torch.tensor([start, end, _cpu_seconds() - cpu, count_wrong()], dtype=torch.float64)
    everyone = torch.empty(2, 4, dtype=torch.float64)
    dist.all_gather(list(everyone.unbind(0)), mine, group=group)
    return (
        float(everyone[:, 1].max() - everyone[:, 0].min()),
        float(everyone[:, 2].sum()),
        int(everyone[:, 3].sum()),
    )


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _repeat(operation: Callable[[], object], repeats: int) -> Block:
    def block() -> None:
        for _ in range(repeats):
            operation()

    return block


def _raw(data: RankData, group: dist.ProcessGroup) -> Callable[[], None]:
    """One isend or irecv of the whole tensor: what the reshard of this layout has to cost at least."""

    def operation() -> None:
        if dist.get_rank() == 0:
            work = dist.isend(data.sources[0], 1, group=group)
        else:
            work = dist.irecv(data.outs[0], 0, group=group)
        assert work is not None
        work.wait()

    return operation


def _prepared(data: RankData) -> Callable[[], None]:
    """The reshard without its Python front: a prepared plan handed to the C++ side."""
    import torch_xmesh as xm
    from torch_xmesh.group import group_of

    layout, placements = data.case.tensors[0], [placement(text) for text in data.case.tensors[0].src]
    spec = xm.Spec(layout.shape, getattr(torch, layout.dtype), xm.Mesh(data.case.src_mesh), placements)
    plan = xm.plan_resharding(spec, xm.Mesh(data.case.dst_mesh), placements)
    group = group_of(None)
    prepared = group.prepare(plan.core, "0", False)

    def operation() -> None:
        group.begin(prepared, data.sources, data.outs, None, False, True).wait()

    return operation


def _reshard(case_name: str, num_bytes: int, repeats: int, runs: int, group: dist.ProcessGroup) -> list[Record]:
    """Shard(0) on rank 0 to Shard(0) on rank 1: the same bytes as one isend and irecv."""
    layout = TensorLayout((num_bytes // 4,), "float32", (S0,), (S0,))
    data = RankData.make(Case(case_name, np.array([0]), np.array([1]), (layout,)), dist.get_rank())
    raw = _raw(data, group)
    operations = {RIVAL: raw, OURS: XmeshMethod(data, "auto", None).run, OURS_CPP: _prepared(data), CONTROL: raw}
    blocks = {name: _repeat(operation, repeats) for name, operation in operations.items()}

    def count_wrong() -> int:
        wrong = data.count_wrong(data.outs)
        data.poison()
        return wrong

    data.poison()
    return _Comparison(case_name, num_bytes, repeats, blocks).run(runs, group, count_wrong)


def _many(case_name: str, repeats: int, runs: int, group: dist.ProcessGroup) -> list[Record]:
    """A thousand tensors of 64 bytes from rank 0 to rank 1, as a dict: into new tensors and into given ones. Gloo
    takes them as one message, copied into one buffer before and out of it after."""
    import torch_xmesh as xm

    layout = TensorLayout((16,), "float32", (S0,), (S0,))
    data = RankData.make(Case(case_name, np.array([0]), np.array([1]), (layout,) * _MANY), dist.get_rank())
    source, target, placements = xm.Mesh([0]), xm.Mesh([1]), [placement(S0)]
    spec = xm.Spec(layout.shape, torch.float32, source, placements)

    def dtensor(local: torch.Tensor, mesh: Any) -> DTensor:
        return DTensor.from_local(
            local, xm.device_mesh(mesh), placements, run_check=False, shape=spec.shape, stride=(1,)
        )

    xs = {f"layer.{i}": dtensor(x, source) if x.numel() else spec for i, x in enumerate(data.sources)}
    out = {f"layer.{i}": dtensor(x, target) for i, x in enumerate(data.outs)}
    made: list[DTensor] = []

    def into_new() -> None:
        nonlocal made
        made = list(xm.reshard_many(xs, target, placements).values())

    def into_given() -> None:
        xm.reshard_many(xs, target, placements, out=out)

    def on_gloo() -> None:
        if dist.get_rank() == 0:
            dist.send(torch.cat(data.sources), 1, group=group)
        else:
            received = torch.empty(layout.shape[0] * _MANY)
            dist.recv(received, 0, group=group)
            torch._foreach_copy_(data.outs, list(torch.split(received, layout.shape[0])))

    def count_wrong() -> int:
        nonlocal made
        wrong = data.count_wrong([y.to_local() for y in made] or data.outs)
        made = []
        data.poison()
        return wrong

    operations = {RIVAL: on_gloo, OURS: into_new, OURS_OUT: into_given, CONTROL: on_gloo}
    blocks = {name: _repeat(operation, repeats) for name, operation in operations.items()}
    data.poison()
    return _Comparison(case_name, 64 * _MANY, repeats, blocks).run(runs, group, count_wrong)


def _all_reduce(case_name: str, repeats: int, runs: int, group: dist.ProcessGroup) -> list[Record]:
    """A 4-byte all_reduce through xmesh (the default group) and through gloo."""
    value = torch.ones(1)
    doublings = 100  # a float holds 127

    def count_wrong() -> int:
        return int(value.item() != 2.0**doublings)

    def double(group: dist.ProcessGroup | None) -> None:
        value.fill_(1.0)
        for _ in range(doublings):
            dist.all_reduce(value, group=group)

    on_gloo = _repeat(lambda: double(group), repeats // doublings)
    on_xmesh = _repeat(lambda: double(None), repeats // doublings)
    blocks = {RIVAL: on_gloo, OURS: on_xmesh, CONTROL: on_gloo}
    return _Comparison(case_name, 4, repeats, blocks).run(runs, group, count_wrong)


def _worker(job: dict[str, Any]) -> None:
    import torch_xmesh as xm

    options = xm.Options()
    options.shared_memory = job["shared_memory"]
    dist.init_process_group("xmesh", pg_options=options)
    group = dist.new_group(backend="gloo")
    large, small, many, all_reduce = CASES

    def done(found: list[Record]) -> None:
        publish(job, [record.to_json() for record in found])

    done(_reshard(large, job["num_bytes"], 1, job["runs"], group))
    done(_reshard(small, 4, _SMALL_REPEATS, job["runs"], group))
    done(_many(many, _MANY_REPEATS, job["runs"], group))
    done(_all_reduce(all_reduce, _ALL_REDUCE_REPEATS, job["runs"], group))
    dist.destroy_process_group()


if __name__ == "__main__":
    _worker(job_of_arguments())
