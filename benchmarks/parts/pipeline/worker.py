"""One rank of a pipeline measurement: every method of a case, with its messages and with messages of one element,
alternating step by step; every gradient of every step is compared with one process.

Started by suites.py on each device with one argument, the path of a job description; rank 0 writes one JSON line
per record.
"""

import dataclasses
import os
import statistics
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import torch_xmesh as xm
from parts.pipeline.method import Grid, Method, flat
from parts.pipeline.methods import INTERLEAVED, Ours, make_method, ranks_of_groups
from parts.pipeline.models import Workload, as_tuple, make
from parts.pipeline.records import Record
from parts.shared.disturbance import ATTEMPTS, DISTURBED, StolenTime
from parts.shared.harness import job_of_arguments, publish
from parts.shared.progress import tell
from torch_xmesh.pipeline import Costs, EdgeCosts, StageCosts
from torch_xmesh.testing import serial_step

SIGNAL = 0.0
"""The ratio of the variant whose messages have one element."""

_NUM_RUNS_MIN = 2
_NUM_PROBES = 3


class Case:
    """One pipeline: its meshes, the methods, and a variant for each ratio of transfer to forward. Every rank of the
    cluster makes it; ranks on no mesh only count along."""

    def __init__(self, job: dict[str, Any], case: dict[str, Any], group: dist.ProcessGroup) -> None:
        self._job, self._case, self._group = job, case, group
        self.grids: list[Grid] = case["meshes"]
        self.rank = dist.get_rank()
        self.is_member = any(self.rank in flat(grid) for grid in self.grids)
        self.ratios = [float(ratio) for ratio in case["variants"]]
        self.keys = [(ratio, name) for ratio in self.ratios for name in case["methods"]]
        self.methods: dict[tuple[float, str], Method] = {}
        self.expected: dict[float, dict[str, torch.Tensor]] = {}
        self.costs: dict[tuple[float, bool], list[tuple[float, float]]] = {}
        self.seconds: dict[tuple[float, str], list[float]] = {key: [] for key in self.keys}
        self.stolen: dict[tuple[float, str], list[float]] = {key: [] for key in self.keys}
        self.wrong = dict.fromkeys(self.keys, 0)

    def workload(self, ratio: float, is_interleaved: bool) -> Workload:
        sizes = dict(self._case["variants"][str(ratio)])
        if is_interleaved:
            blocks = sizes["blocks_per_stage"]
            sizes |= {"num_stages": 2 * sizes["num_stages"], "blocks_per_stage": blocks // 2}
            sizes["forward_s"] /= 2
        return make(self._case["kind"], sizes)

    def prepare(self) -> None:
        """Makes all engines, the gradients of one process, and measures each stage by itself."""
        for ratio in self.ratios:
            self.expected[ratio] = serial_gradients(self.workload(ratio, False))
            for is_interleaved in sorted({False} | {name in INTERLEAVED for name in self._case["methods"]}):
                self.costs[ratio, is_interleaved] = self._measured_costs(self.workload(ratio, is_interleaved))
        groups: dict[tuple[int, ...], Any] = {}
        for name in self._case["methods"]:
            for ranks in ranks_of_groups(name, self.grids):
                if ranks not in groups:
                    groups[ranks] = dist.new_group(list(ranks), backend="gloo")
        told = {ratio: self._costs(ratio, self.workload(ratio, False), is_interleaved=False) for ratio in self.ratios}
        for ratio, name in self.keys:
            if self.is_member:
                workload = partial(self.workload, ratio)
                self.methods[ratio, name] = make_method(name, workload, self.grids, groups, told[ratio])

    def _measured_costs(self, workload: Workload) -> list[tuple[float, float]]:
        """F and B of each stage in seconds: medians on its first rank, all stages at the same time."""
        entering = workload.boundaries()
        mine = torch.zeros(len(workload.stages), 2, dtype=torch.float64)
        dist.barrier(group=self._group)
        for stage in range(len(workload.stages)):
            if flat(self.grids[stage % len(self.grids)])[0] == self.rank:
                mine[stage] = torch.tensor(stage_seconds(workload, stage, entering[stage]), dtype=torch.float64)
        dist.all_reduce(mine, group=self._group)
        return [(float(forward), float(backward)) for forward, backward in mine]

    def run_undisturbed(self, key: tuple[float, str], deadline: float) -> None:
        """A timed step, repeated while other machines took too much of this one and there is time: the one that lost
        least counts."""
        tried = [self.run(key)]
        while tried[-1][1] > DISTURBED and len(tried) < ATTEMPTS and self._is_before(deadline):
            tried.append(self.run(key))
        seconds, stolen = min(tried, key=lambda run: run[1])
        self.seconds[key].append(seconds)
        self.stolen[key].append(stolen)

    def run(self, key: tuple[float, str]) -> tuple[float, float]:
        """One step of one method, from the first rank's start to the last one's end, and the check of its gradients;
        returns its time and the share of the cores' time that other machines got. Equal on all ranks."""
        method = self.methods.get(key)
        start, end, wrong = float("inf"), 0.0, 0
        if method is not None:
            method.zero_gradients()
        stolen = StolenTime()
        dist.barrier(group=self._group)
        if method is not None:
            start = time.monotonic()
            method.step()
            end = time.monotonic()
        share = stolen.share()
        if method is not None:
            wrong = count_wrong(method.gradients(), self.expected[key[0]])
        mine = torch.tensor([start, end, wrong, share], dtype=torch.float64)
        everyone = torch.empty(dist.get_world_size(), 4, dtype=torch.float64)
        dist.all_gather(list(everyone.unbind(0)), mine, group=self._group)
        self.wrong[key] += int(everyone[:, 2].sum())
        return float(everyone[:, 1].max() - everyone[:, 0].min()), float(everyone[everyone[:, 1].argmax(), 3])

    def measure(self, deadline: float) -> None:
        """One uncounted step of each, then rounds of all until there are enough or rank 0's clock says stop."""
        for key in self.keys:
            self._tell(key, "first step", deadline)
            self.run(key)
        for done in range(self._job["runs"]):
            begin = time.monotonic()
            for key in self.keys:
                self._tell(key, f"run {done + 1} of {self._job['runs']}", deadline)
                self.run_undisturbed(key, deadline)
            round_seconds = time.monotonic() - begin
            if done + 1 >= _NUM_RUNS_MIN and not self._is_before(deadline - round_seconds):
                break

    def _tell(self, key: tuple[float, str], run: str, deadline: float) -> None:
        if self.rank == 0:
            ratio, name = key
            size = "messages of one element" if ratio == SIGNAL else f"r{ratio:g}"
            tell(f"{self._case['name']} {size}", name, run, deadline - time.monotonic())

    def _is_before(self, deadline: float) -> bool:
        """By rank 0's clock, so that all ranks decide alike."""
        is_before = torch.tensor([int(time.monotonic() < deadline)])
        dist.broadcast(is_before, 0, group=self._group)
        return bool(is_before)

    def records(self) -> list[Record]:
        """One record per method that ran with real messages. Runs with messages of one element are the `signal_seconds`
        of these. Meaningful on rank 0."""
        return [self._record(ratio, name) for ratio, name in self.keys if ratio != SIGNAL]

    def _record(self, ratio: float, name: str) -> Record:
        seconds = self.seconds[ratio, name]
        signal = self.seconds.get((SIGNAL, name))
        method = self.methods[ratio, name]
        return Record(
            suite=self._job["suite"],
            case=self._case["name"],
            stages=len(self.grids),
            microbatches=method.workload.num_microbatches,
            ratio=ratio,
            method=name,
            seconds=statistics.median(seconds),
            seconds_min=min(seconds),
            seconds_max=max(seconds),
            signal_seconds=None if signal is None else statistics.median(signal),
            ideal_seconds=self._simulated(ratio, name, 0.0),
            predicted_seconds=self._simulated(ratio, name, 1.0),
            peak_in_flight=max(method.schedule.peak_in_flight),
            wrong=self.wrong[ratio, name] + self.wrong.get((SIGNAL, name), 0),
            runs=len(seconds),
            stolen=statistics.median(self.stolen[ratio, name]),
        )

    def _simulated(self, ratio: float, name: str, scale: float) -> float:
        """The method's schedule with the measured stages, its messages' bytes times `scale` over the measured NICs."""
        method = self.methods[ratio, name]
        costs = dataclasses.replace(
            self._costs(ratio, method.workload, name in INTERLEAVED, scale),
            overlap=method.is_overlapped or scale == 0,
            blocks_receiver=method.blocks_receiver,
            early_weights=method.early_weights and self._may_run_early(),
        )
        return xm.simulate(method.schedule, costs).makespan_seconds

    def _costs(self, ratio: float, workload: Workload, is_interleaved: bool, scale: float = 1.0) -> Costs:
        """Those of our engine."""
        stages = [
            StageCosts(
                forward_seconds=forward,
                backward_seconds=backward,
                backward_input_seconds=backward / 2,
                backward_weight_seconds=backward / 2,
            )
            for forward, backward in self.costs[ratio, is_interleaved]
        ]
        sizes = enumerate(workload.boundary_bytes())
        edges = {(k, k + 1): EdgeCosts(forward_bytes=int(size * scale)) for k, size in sizes}
        nic = self._job["nic_bytes_per_s"]
        return Costs(stages=stages, edges=edges, nic_bytes_per_s=nic, early_weights=self._may_run_early())

    def _may_run_early(self) -> bool:
        return all(len(flat(grid)) == 1 for grid in self.grids)

    def timelines(self, folder: str) -> None:
        """Pictures of the last step of each of our methods."""
        for (ratio, name), method in self.methods.items():
            if isinstance(method, Ours):
                method.timeline(
                    f"{folder}/{self._case['name']}-m{method.workload.num_microbatches}-r{ratio}-{name}.png"
                )

    def close(self) -> None:
        for method in self.methods.values():
            method.close()


def serial_gradients(workload: Workload) -> dict[str, torch.Tensor]:
    """What one process gets for the same microbatches, without waits."""
    workload.wait(False)
    serial_step(
        workload.model,
        workload.args,
        target=workload.target,
        loss_fn=workload.loss_fn,
        num_microbatches=workload.num_microbatches,
    )
    return {name: p.grad for name, p in workload.model.named_parameters() if p.grad is not None}


def count_wrong(actual: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor]) -> int:
    """Elements beyond float32's tolerance for sums in another order; all of a gradient that is missing."""
    wrong = 0
    for name, gradient in actual.items():
        want = expected[name]
        if gradient is None or gradient.shape != want.shape:
            wrong += want.numel()
        else:
            tolerance = 1e-4 * want.abs() + 1e-5 * want.abs().max()
            wrong += int((~((gradient - want).abs() <= tolerance)).sum())
    return wrong


def stage_seconds(workload: Workload, stage: int, inputs: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    """F and B of one microbatch on one stage by itself, without an engine: medians."""
    module, is_last = workload.stages[stage], stage + 1 == len(workload.stages)
    target = workload.target[: len(workload.target) // workload.num_microbatches]
    forwards, backwards = [], []
    for probe in range(_NUM_PROBES + 1):
        leaves = [value.detach().requires_grad_(stage > 0) for value in inputs]
        begin = time.monotonic()
        outputs = as_tuple(module(*leaves))
        roots = (workload.loss_fn(outputs[0], target),) if is_last else outputs
        middle = time.monotonic()
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        if probe > 0:
            forwards.append(middle - begin)
            backwards.append(time.monotonic() - middle)
    return statistics.median(forwards), statistics.median(backwards)


def main() -> None:
    job = job_of_arguments()
    rank = int(os.environ["RANK"])
    if job["is_pinned"]:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("xmesh", timeout=timedelta(seconds=job["timeout_seconds"]))
    group: Any = dist.new_group(backend="gloo")
    deadline = time.monotonic() + job["budget_seconds"]
    for index, description in enumerate(job["cases"]):
        case = Case(job, description, group)
        case.prepare()
        now = time.monotonic()
        case.measure(now + (deadline - now) / (len(job["cases"]) - index))
        if job["timelines"]:
            case.timelines(job["timelines"])
        publish(job, [record.to_json() for record in case.records()] if rank == 0 else [])
        case.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
