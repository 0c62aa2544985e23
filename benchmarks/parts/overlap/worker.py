"""One rank of overlap_perf.py: the same model under plans that overlap and plans that do not, and under DDP and FSDP2,
step by step in turn; every gradient of every step is compared with one process.

Started on each device with one argument, the path of a job description; rank 0 writes one JSON line per record.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_xmesh as xm
from parts.overlap.models import WORKLOADS, Planner, Subject
from parts.shared.harness import job_of_arguments, publish
from parts.shared.pacing import Paced
from parts.shared.steps import Method, TimedSteps, gradients_of
from torch_xmesh.calibration import calibrate

_ROUNDS = 3
"""Plans that are made until devices are so fast that communication is the wanted part of computation."""


class Trained(Method):
    """A way to train a subject on all ranks; `plan`: None of rivals."""

    plan: xm.ParallelPlan | None = None


class Planned(Trained):
    """A plan in torch_xmesh's engine."""

    def __init__(self, one: Subject, plan: xm.ParallelPlan) -> None:
        self._subject, self.plan = one, plan
        example = one.batch[: len(one.batch) * plan.parts // plan.num_microbatches]
        self._engine = xm.PipelineEngine(one.make(), (example,), plan=plan, loss_fn=one.loss_fn)

    def step(self) -> None:
        self._engine.step(self._subject.batch, target=self._subject.target, return_outputs=False)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return dict(self._engine.named_parameters())

    def close(self) -> None:
        self._engine.close()


class DataParallel(Trained):
    """As a user of torch writes it: DDP, or FSDP2 with each layer by itself."""

    def __init__(self, one: Subject, kind: str, group: Any) -> None:
        self._subject, model = one, one.make()
        size, rank = dist.get_world_size(), dist.get_rank()
        self._batch, self._target = one.batch.chunk(size)[rank], one.target.chunk(size)[rank]
        if kind == "DDP":
            self._model: Any = DistributedDataParallel(model, process_group=group)
            return
        mesh = init_device_mesh("cpu", (size,))
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        self._model = fully_shard(model, mesh=mesh)

    def step(self) -> None:
        self._subject.loss_fn(self._model(self._batch), self._target).backward()  # type: ignore[no-untyped-call]

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return {name.removeprefix("module."): one for name, one in self._model.named_parameters()}


_PLANS: dict[str, Callable[[int], Planner]] = {
    "auto": lambda _: xm.plan_parallel,
    "auto serial": lambda _: partial(xm.plan_parallel, overlap=False),
    "DP": lambda _: xm.presets.data_parallel,
    "ZeRO-3": lambda _: xm.presets.zero_3,
    "Megatron": lambda devices: partial(xm.presets.megatron, tensor_parallel=devices),
}
"""Plans other than the workload's own, by method, for so many devices."""
_ORDERS: dict[str, dict[str, Any]] = {
    "unsplit": {"overlap": False},
    "accumulation": {"overlap": False},
    "duplex": {"schedule": "duplex"},
    "overlap": {"overlap": True},
}


@dataclasses.dataclass(frozen=True)
class Planning:
    """A workload on devices of some speed.

    Attributes:
        options: of all planners.
    """

    subject: Subject
    planner: Planner
    devices: int
    num_microbatches: int
    options: Mapping[str, Any]

    def plan(self, method: str, flops: float) -> xm.ParallelPlan:
        options = {**self.options, "compute": xm.Compute(flops=flops, bytes_per_s=1e15)}
        planner, count, samples = self.planner, self.num_microbatches, len(self.subject.batch)
        if method in _PLANS:
            planner = _PLANS[method](self.devices)
        else:
            options |= _ORDERS[method]
            count = max(count, 2) if method == "accumulation" else count
        example = self.subject.batch[: samples // count]
        return planner(self.subject.make(), (example,), num_microbatches=count, **options)

    def fast_enough(self, ratio: float) -> float:
        """Operations per second of devices on which the plan without overlap communicates for this part of its
        computation."""
        flops = 1e9
        for _ in range(_ROUNDS):
            step = self.plan("unsplit", flops).step
            communicated = step.collectives + step.sums
            flops *= ratio * step.compute / communicated if communicated else 1.0
        return flops


class Case:
    """A model with devices so fast that its plan without overlap communicates for a given part of its computation."""

    def __init__(
        self, job: dict[str, Any], case: dict[str, Any], topology: xm.Topology, paced: Paced, group: Any
    ) -> None:
        self._job, self._case = job, case
        workload, hosts, devices = WORKLOADS[case["model"]], job["hosts"], job["devices"]
        one = workload.subject(case["samples"])
        options = {
            "devices": xm.Mesh(torch.arange(hosts * devices).view(hosts, devices), device_type="cpu"),
            "topology": topology,
            "loss_fn": one.loss_fn,
        }
        count = max(case["microbatches"], workload.least_microbatches)
        planning = Planning(one, workload.planner(hosts * devices), hosts * devices, count, options)
        paced.flops = planning.fast_enough(case["ratio"])
        self.methods: dict[str, Trained] = {}
        for name in case["methods"]:
            if name in ("DDP", "FSDP2"):
                self.methods[name] = DataParallel(one, name, group)
            else:
                self.methods[name] = Planned(one, planning.plan(name, paced.flops))
        expected = gradients_of(one.make(), one.batch, one.target, one.loss_fn)
        self._steps = TimedSteps(self.methods, expected, paced, group, tolerance=1e-3)

    def measure(self) -> None:
        self._steps.measure(self._case["name"], self._job)

    def records(self) -> list[dict[str, Any]]:
        out = []
        for name, method in self.methods.items():
            plan = method.plan
            step = None if plan is None else dataclasses.asdict(plan.step)
            meshes = "" if plan is None else " | ".join("x".join(map(str, stage.mesh_shape)) for stage in plan.stages)
            out.append(
                {
                    "case": self._case["name"],
                    "text": "" if plan is None else f"{meshes} {plan.schedule}",
                    "computed_seconds": self._steps.computed[name],
                    "predicted": step,
                    **self._steps.record(name),
                }
            )
        return out

    def close(self) -> None:
        for method in self.methods.values():
            method.close()


def main() -> None:
    job = job_of_arguments()
    dist.init_process_group("xmesh", timeout=timedelta(seconds=job["timeout_seconds"]))
    group: Any = dist.new_group(backend="gloo")
    topology = calibrate(num_bytes=8 << 20)
    paced = Paced()
    for description in job["cases"]:
        case = Case(job, description, topology, paced, group)
        case.measure()
        publish(job, case.records() if int(os.environ["RANK"]) == 0 else [])
        case.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
