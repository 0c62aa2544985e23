"""One rank of auto_parallel.py: plans, presets and rivals train the same model, step by step in turn; every gradient of
every step is compared with one process.

Started on each device with one argument, the path of a job description; rank 0 writes one JSON line per record.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_xmesh as xm
from parts.auto_parallel.models import Subject, subject
from parts.shared.harness import job_of_arguments, publish
from parts.shared.pacing import Paced
from parts.shared.steps import Method, TimedSteps, gradients_of
from torch_xmesh import _C
from torch_xmesh.calibration import calibrate

_NUM_PROBES = 10
_PROBE_BYTES = 1 << 20


class Trained(Method):
    """A way to train a subject on all ranks.

    Attributes:
        predicted_seconds: of a step; None where nobody says.
        text: what is run, in a word.
    """

    predicted_seconds: float | None = None
    text = ""


class Planned(Trained):
    """A plan in torch_xmesh's engine."""

    def __init__(self, one: Subject, plan: xm.ParallelPlan) -> None:
        self._subject, self.predicted_seconds = one, plan.predicted_seconds
        meshes = " | ".join("x".join(map(str, stage.mesh_shape)) for stage in plan.stages)
        self.text = f"{meshes} {plan.schedule}"
        self._engine = xm.PipelineEngine(one.make(), (one.example,), plan=plan, loss_fn=one.loss_fn)

    def step(self) -> None:
        self._engine.step(self._subject.batch, target=self._subject.target, return_outputs=False)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return dict(self._engine.named_parameters())

    def close(self) -> None:
        self._engine.close()


class ByHand(Trained):
    """As a user writes it with torch: data parallel over hosts and tensor parallel within them, or FSDP2 over all
    devices; gradients are summed with the last microbatch."""

    def __init__(self, one: Subject, mesh: DeviceMesh, tensor_parallel: DeviceMesh | None) -> None:
        self._subject, self._mesh = one, mesh
        model = one.make()
        placed = one.tensor_parallel(model) if one.tensor_parallel is not None else {}
        if tensor_parallel is not None:
            styles = {"column": ColwiseParallel, "row": RowwiseParallel}
            parallelize_module(model, tensor_parallel, {name: styles[style]() for name, style in placed.items()})
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": False}
        for block in one.blocks(model):
            fully_shard(block, **options)
        self._model: Any = fully_shard(model, **options)

    def step(self) -> None:
        one, size, at = self._subject, self._mesh.size(), self._mesh.get_local_rank()
        batches = one.batch.chunk(one.num_microbatches)
        targets = one.target.chunk(one.num_microbatches)
        for number, (batch, target) in enumerate(zip(batches, targets, strict=True)):
            self._model.set_requires_gradient_sync(number + 1 == one.num_microbatches)
            loss = one.loss_fn(self._model(batch.chunk(size)[at]), target.chunk(size)[at])
            (loss / one.num_microbatches).backward()  # type: ignore[no-untyped-call]

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return dict(self._model.named_parameters())


def measured_topology(hosts: int, devices: int) -> xm.Topology:
    """What network interfaces carry. And, of gloo's all-reduces, what a message takes and what hosts carry inside where
    all devices have theirs at the same time: they share this machine's cores."""
    found = calibrate(num_bytes=8 << 20).links
    ranks = torch.arange(hosts * devices)
    within = _group(list(ranks.view(hosts, devices)), "gloo")
    everyone = _group([ranks], "gloo")
    small, large = _all_reduce_seconds(within, 1), _all_reduce_seconds(within, _PROBE_BYTES // 4)
    per_byte = _C.collective_cost("gloo", "all-reduce", float(_PROBE_BYTES), (devices, 0.0, 1.0))
    return xm.Topology(
        devices_per_host=devices,
        nic_bytes_per_s=found.nic_bytes_per_s,
        local_bytes_per_s=round(per_byte / max(large - small, 1e-9)),
        latency_us=_all_reduce_seconds(everyone, 1) * 1e6 / (2 * (hosts * devices - 1)),  # messages of a ring
        local_latency_us=small * 1e6 / (2 * (devices - 1)),
    )


def _all_reduce_seconds(group: dist.ProcessGroup, count: int) -> float:
    """Median seconds of an all-reduce of `count` float32 elements; the mean over ranks, so that all have the same."""
    taken, sent = [], torch.zeros(count)
    for _ in range(_NUM_PROBES):
        dist.barrier()
        begin = time.monotonic()
        for _ in range(_NUM_PROBES):
            dist.all_reduce(sent, group=group)
        taken.append((time.monotonic() - begin) / _NUM_PROBES)
    mean = torch.tensor([statistics.median(taken)], dtype=torch.float64)
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def plans_of(
    one: Subject, topology: xm.Topology, job: dict[str, Any], case: dict[str, Any]
) -> Mapping[str, Callable[[], xm.ParallelPlan]]:
    """By method, who makes its plan."""
    hosts, devices = job["hosts"], job["devices"]
    rates = {host: xm.Compute(flops=flops, bytes_per_s=1e15) for host, flops in enumerate(case["flops"])}
    options: dict[str, Any] = {
        "devices": xm.Mesh(torch.arange(hosts * devices).view(hosts, devices), device_type="cpu"),
        "num_microbatches": one.num_microbatches,
        "compute": rates if len(set(case["flops"])) > 1 else rates[0],
        "topology": topology,
        "loss_fn": one.loss_fn,
    }
    model, args = one.make(), (one.example,)
    presets = xm.presets
    made: dict[str, Callable[..., xm.ParallelPlan]] = {
        "found": xm.plan_parallel,
        "DP": presets.data_parallel,
        "ZeRO-2": presets.zero_2,
        "ZeRO-3": presets.zero_3,
        "Megatron 4": partial(presets.megatron, tensor_parallel=4),
        "Megatron 8": partial(presets.megatron, tensor_parallel=8),
        "PP 2 x DP 4": partial(presets.pipeline, num_stages=2),
        "PP 4 x DP 2": partial(presets.pipeline, num_stages=4),
        "PP 2 x TP 4": partial(presets.pipeline, num_stages=2, tensor_parallel=4),
        "PP 2 x TP 2": partial(presets.pipeline, num_stages=2, tensor_parallel=2),
    }
    plans = {name: partial(make, model, args, **options) for name, make in made.items()}
    return plans | {f"{name} serial": partial(make, overlap=False) for name, make in plans.items()}


class Rivals:
    """Meshes of the rivals, on gloo and on xmesh; made once by all ranks."""

    def __init__(self, hosts: int, devices: int) -> None:
        ranks = torch.arange(hosts * devices)
        grid = ranks.view(hosts, devices)
        self._meshes: dict[str, tuple[DeviceMesh, DeviceMesh]] = {}
        for backend in ("gloo", "xmesh"):
            flat = DeviceMesh.from_group(_group([ranks], backend), "cpu")
            groups = [_group(list(grid.T), backend), _group(list(grid), backend)]
            both = DeviceMesh.from_group(groups, "cpu", mesh=grid, mesh_dim_names=("data", "tensor"))
            self._meshes[backend] = flat, both

    def make(self, name: str, one: Subject) -> Trained:
        kind, _, backend = name.partition(" on ")
        flat, both = self._meshes[backend]
        return ByHand(one, flat, None) if kind == "FSDP2" else ByHand(one, both["data"], both["tensor"])


def _group(groups: list[torch.Tensor], backend: str) -> dist.ProcessGroup:
    """This rank's of some that all ranks make."""
    made = [(group.tolist(), dist.new_group(group.tolist(), backend=backend)) for group in groups]
    ((_, mine),) = [(ranks, group) for ranks, group in made if dist.get_rank() in ranks]
    return cast(dist.ProcessGroup, mine)


class Case:
    """A model on devices of some speed, under all methods. Every rank makes it."""

    def __init__(
        self, job: dict[str, Any], case: dict[str, Any], topology: xm.Topology, rivals: Rivals, paced: Paced, group: Any
    ) -> None:
        self._job, self._case, self._group = job, case, group
        self._subject = subject(case["model"])
        plans = plans_of(self._subject, topology, job, case)
        self.methods: dict[str, Trained] = {}
        for name in case["methods"]:
            if name in plans:
                self.methods[name] = Planned(self._subject, plans[name]())
            elif name.startswith("FSDP2") or self._subject.tensor_parallel is not None:
                self.methods[name] = rivals.make(name, self._subject)
        one = self._subject
        self._steps = TimedSteps(
            self.methods, gradients_of(one.make(), one.batch, one.target, one.loss_fn), paced, group
        )
        paced.flops = case["flops"][dist.get_rank() // job["devices"]]

    def measure(self) -> None:
        self._steps.measure(self._case["name"], self._job)

    def records(self) -> list[dict[str, Any]]:
        return [
            {
                "case": self._case["name"],
                "text": method.text,
                "predicted_seconds": method.predicted_seconds,
                **self._steps.record(name),
            }
            for name, method in self.methods.items()
        ]

    def close(self) -> None:
        for method in self.methods.values():
            method.close()


def main() -> None:
    job = job_of_arguments()
    dist.init_process_group("xmesh", timeout=timedelta(seconds=job["timeout_seconds"]))
    group: Any = dist.new_group(backend="gloo")
    topology = measured_topology(job["hosts"], job["devices"])
    paced = Paced()
    rivals = Rivals(job["hosts"], job["devices"])
    for description in job["cases"]:
        case = Case(job, description, topology, rivals, paced, group)
        case.measure()
        publish(job, case.records() if int(os.environ["RANK"]) == 0 else [])
        case.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
