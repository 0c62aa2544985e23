"""One rank of auto_parallel.py: plans, presets and rivals train the same model, step by step in turn; every gradient of
every step is compared with one process.

Started on each device with one argument, the path of a job description; rank 0 writes one JSON line per record.
"""

import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_xmesh as xm
from parts.auto_parallel.models import Paced, Subject, subject
from parts.shared.harness import job_of_arguments, publish
from parts.shared.progress import tell
from torch_xmesh import _C
from torch_xmesh.calibration import calibrate

_NUM_PROBES = 10
_PROBE_BYTES = 1 << 20


class Method(ABC):
    """A way to train a subject on all ranks.

    Attributes:
        predicted_seconds: of a step; None where nobody says.
        text: what is run, in a word.
    """

    predicted_seconds: float | None = None
    text = ""

    @abstractmethod
    def step(self) -> None: ...

    @abstractmethod
    def parameters(self) -> Mapping[str, torch.Tensor]: ...

    def zero_gradients(self) -> None:
        for parameter in self.parameters().values():
            parameter.grad = None

    def close(self) -> None:  # noqa: B027  # most have nothing
        """Ends what it holds."""


class Planned(Method):
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


class ByHand(Method):
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
) -> dict[str, Callable[[], xm.ParallelPlan]]:
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
    return {
        "found": lambda: xm.plan_parallel(model, args, **options),
        "DP": lambda: presets.data_parallel(model, args, **options),
        "ZeRO-2": lambda: presets.zero_2(model, args, **options),
        "ZeRO-3": lambda: presets.zero_3(model, args, **options),
        "Megatron 4": lambda: presets.megatron(model, args, tensor_parallel=4, **options),
        "Megatron 8": lambda: presets.megatron(model, args, tensor_parallel=8, **options),
        "PP 2 x DP 4": lambda: presets.pipeline(model, args, num_stages=2, **options),
        "PP 4 x DP 2": lambda: presets.pipeline(model, args, num_stages=4, **options),
        "PP 2 x TP 4": lambda: presets.pipeline(model, args, num_stages=2, tensor_parallel=4, **options),
        "PP 2 x TP 2": lambda: presets.pipeline(model, args, num_stages=2, tensor_parallel=2, **options),
    }


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

    def make(self, name: str, one: Subject) -> Method:
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
        self.methods: dict[str, Method] = {}
        for name in case["methods"]:
            if name in plans:
                self.methods[name] = Planned(self._subject, plans[name]())
            elif name.startswith("FSDP2") or self._subject.tensor_parallel is not None:
                self.methods[name] = rivals.make(name, self._subject)
        self._expected = self._gradients()
        self._seconds: dict[str, list[float]] = {name: [] for name in self.methods}
        self._wrong = dict.fromkeys(self.methods, 0)
        self._paced = paced
        paced.flops = case["flops"][dist.get_rank() // job["devices"]]

    def _gradients(self) -> dict[str, torch.Tensor]:
        """What one process gets."""
        model = self._subject.make()
        self._subject.loss_fn(model(self._subject.batch), self._subject.target).backward()  # type: ignore[no-untyped-call]
        return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}

    def run(self, name: str) -> float:
        """A step, from the first rank's start to the last one's end; its gradients are checked."""
        method = self.methods[name]
        method.zero_gradients()
        with self._paced:
            dist.barrier(group=self._group)
            begin = time.monotonic()
            method.step()
            end = time.monotonic()
        times = torch.tensor([-begin, end], dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX, group=self._group)
        wrong = torch.tensor([self._count_wrong(method)])
        dist.all_reduce(wrong, group=self._group)
        self._wrong[name] += int(wrong)
        return float(times.sum())

    def _count_wrong(self, method: Method) -> int:
        """Elements beyond float32's tolerance for sums in another order; all of a gradient that is missing."""
        wrong = 0
        for name, parameter in method.parameters().items():
            expected, found = self._expected[name], parameter.grad
            if isinstance(found, DTensor):
                found = found.full_tensor()
            if found is None or found.shape != expected.shape:
                wrong += expected.numel()
            else:
                tolerance = 1e-4 * expected.abs() + 1e-5 * expected.abs().max() + 1e-9
                wrong += int((~((found - expected).abs() <= tolerance)).sum())
        return wrong

    def measure(self) -> None:
        """One uncounted step of each, then rounds of all."""
        for number in range(1 + self._job["runs"]):
            for name in self.methods:
                if dist.get_rank() == 0:
                    tell(
                        self._case["name"],
                        name,
                        f"run {number} of {self._job['runs']}",
                        self._job["ends_at"] - time.time(),
                    )
                seconds = self.run(name)
                if number:
                    self._seconds[name].append(seconds)

    def records(self) -> list[dict[str, Any]]:
        return [
            {
                "case": self._case["name"],
                "method": name,
                "text": method.text,
                "seconds": statistics.median(self._seconds[name]),
                "seconds_min": min(self._seconds[name]),
                "seconds_max": max(self._seconds[name]),
                "predicted_seconds": method.predicted_seconds,
                "runs": len(self._seconds[name]),
                "wrong": self._wrong[name],
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
