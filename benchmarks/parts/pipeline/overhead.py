"""What a pipeline engine itself costs the CPU, per action: 1-element tensors on loopback, ours and torch's alternated.

An action is what PyTorch's own count takes for one: a compute action (forward, backward, or one of a split backward's
halves, of one microbatch on one stage), or one boundary send or receive of one microbatch. A rank with one neighbor has
two of these for each microbatch, a rank with two neighbors four, besides two compute actions, or three.

The bare stage is the same module run by hand on the calling thread over the same microbatches: forward, loss on the
last stage, ``torch.autograd.backward``; nothing is sent. What an engine's step takes beyond that is its overhead.

CPU times are ``CLOCK_THREAD_CPUTIME_ID`` of the calling thread, and of the process for all threads. Each rank takes
medians over its steps; a record sums the ranks' medians and divides by their actions.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parts.pipeline.records import OverheadRecord
from parts.shared.harness import job_of_arguments, launch, publish
from parts.shared.progress import Listener, ignore_rows, tell
from torch_xmesh.testing.cluster import EmulatedCluster

OURS = ("1f1b", "eager_1f1b", "zb_h1")
SPLIT = ("zb_h1",)
RIVAL = "torch_1f1b"
METHODS = (*OURS, RIVAL)
_BARE = "bare"
_TIMEOUT_SECONDS = 300.0

Step = Callable[[], object]


def run(
    *,
    stages: Sequence[int] = (2, 4),
    microbatches: Sequence[int] = (16,),
    rounds: int = 6,
    steps_per_round: int = 25,
    methods: Sequence[str] = METHODS,
    on_records: Callable[[list[OverheadRecord]], None] | None = None,
) -> list[OverheadRecord]:
    """Measures every number of stages with every number of microbatches, one process per stage; `on_records` gets the
    records of each as soon as they are measured.

    Returns:
        one record per point and method.

    Raises:
        MeasurementError: a rank failed or did not end.
    """
    records: list[OverheadRecord] = []
    for num_stages in stages:
        for num_microbatches in microbatches:
            job = {
                "microbatches": num_microbatches,
                "rounds": rounds,
                "steps": steps_per_round,
                "methods": list(methods),
            }
            found = _measure(num_stages, job)
            if on_records is not None:
                on_records(found)
            records += found
    return records


def _measure(num_stages: int, job: dict[str, Any]) -> list[OverheadRecord]:
    listener = Listener(ignore_rows)
    with EmulatedCluster(hosts=1, devices=num_stages, rate=None, output=listener.stream) as cluster:
        done = launch(cluster, listener, Path(__file__), job, _TIMEOUT_SECONDS)
    return [OverheadRecord(**record) for record in done.records]


def num_actions(stage: int, num_stages: int, num_microbatches: int, is_split: bool = False) -> tuple[int, int]:
    """Compute actions, and boundary sends and receives, of one stage in one step."""
    neighbors = int(stage > 0) + int(stage < num_stages - 1)
    return (3 if is_split else 2) * num_microbatches, 2 * neighbors * num_microbatches


class _Rank:
    """One rank's stage and batch, with a step of each engine and of none."""

    def __init__(self, num_microbatches: int) -> None:
        self.stage, self.num_stages = dist.get_rank(), dist.get_world_size()
        self.num_microbatches = num_microbatches
        self.is_first, self.is_last = self.stage == 0, self.stage == self.num_stages - 1
        self.batch = torch.ones(num_microbatches, 1)
        self.args = (self.batch,) if self.is_first else ()
        self.target = torch.zeros(num_microbatches, 1) if self.is_last else None
        self.loss = nn.MSELoss()

    def module(self) -> nn.Module:
        return nn.Linear(1, 1)

    def bare(self) -> Step:
        module = self.module()
        inputs, gradient = [self.batch[i : i + 1] for i in range(self.num_microbatches)], torch.ones(1, 1)
        targets = [torch.zeros(1, 1) for _ in inputs]

        def step() -> None:
            for one, target in zip(inputs, targets, strict=True):
                output = module(one if self.is_first else one.detach().requires_grad_())
                if self.is_last:
                    torch.autograd.backward(self.loss(output, target))
                else:
                    torch.autograd.backward(output, gradient)

        return step

    @contextmanager
    def ours(self, schedule: str) -> Iterator[Step]:
        import torch_xmesh as xm

        engine = xm.PipelineEngine(
            [self.module() for _ in range(self.num_stages)],
            (self.batch[:1],),
            meshes=[xm.Mesh([rank]) for rank in range(self.num_stages)],
            schedule=schedule,
            num_microbatches=self.num_microbatches,
            loss_fn=self.loss,
        )
        yield lambda: engine.step(*self.args, target=self.target, return_outputs=False)
        engine.close()

    def torchs(self, group: dist.ProcessGroup) -> Step:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        example = torch.ones(1, 1, requires_grad=not self.is_first)
        stage = PipelineStage(
            self.module(),
            self.stage,
            self.num_stages,
            torch.device("cpu"),
            input_args=(example,),
            output_args=(torch.ones(1, 1, requires_grad=True),),
            group=group,
        )
        schedule = Schedule1F1B(stage, self.num_microbatches, loss_fn=self.loss)

        return lambda: schedule.step(*self.args, target=self.target, return_outputs=False)


def _time(step: Step, steps: int) -> list[tuple[int, int]]:
    """Nanoseconds of the calling thread and of all threads, per step."""
    out = []
    for _ in range(steps):
        thread, process = time.thread_time_ns(), time.process_time_ns()
        step()
        out.append((time.thread_time_ns() - thread, time.process_time_ns() - process))
    return out


def _medians(steps: dict[str, Step], rounds: int, steps_per_round: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Microseconds per step of this rank: a row per entry of `steps`, columns calling thread and all threads."""
    samples: dict[str, list[tuple[int, int]]] = {name: [] for name in steps}
    began = time.monotonic()
    for round_index in range(rounds + 1):
        for name, step in steps.items():
            if dist.get_rank() == 0:
                left = _TIMEOUT_SECONDS - (time.monotonic() - began)
                tell(f"{len(steps) - 1} methods", name, f"round {round_index} of {rounds}", left)
            dist.barrier(group=group)
            found = _time(step, steps_per_round)
            samples[name] += found if round_index > 0 else []
    return torch.tensor(
        [[statistics.median(column) / 1e3 for column in zip(*found, strict=True)] for found in samples.values()],
        dtype=torch.float64,
    )


def _worker(job: dict[str, Any]) -> None:
    import torch_xmesh  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("xmesh")
    group = dist.new_group(backend="gloo")
    rank = _Rank(job["microbatches"])
    ours = {name: rank.ours(name) for name in job["methods"] if name in OURS}
    steps: dict[str, Step] = {_BARE: rank.bare(), **{name: engine.__enter__() for name, engine in ours.items()}}
    if RIVAL in job["methods"]:
        steps[RIVAL] = rank.torchs(group)
    mine = _medians(steps, job["rounds"], job["steps"], group)
    everyone = [torch.empty_like(mine) for _ in range(rank.num_stages)]
    dist.all_gather(everyone, mine, group=group)
    for engine in ours.values():
        engine.__exit__(None, None, None)
    dist.barrier(group=group)
    dist.destroy_process_group()
    publish(job, [record.to_json() for record in _records(list(steps), everyone, job["microbatches"])])


def _records(names: Sequence[str], everyone: Sequence[torch.Tensor], num_microbatches: int) -> list[OverheadRecord]:
    num_stages = len(everyone)
    total = torch.stack(list(everyone)).sum(0)
    bare = total[names.index(_BARE)]
    records = []
    for name, row in zip(names, total, strict=True):
        if name == _BARE:
            continue
        counts = [num_actions(stage, num_stages, num_microbatches, name in SPLIT) for stage in range(num_stages)]
        compute = sum(one for one, _ in counts)
        actions = compute + sum(one for _, one in counts)
        thread, process = (row - bare).tolist()
        records.append(
            OverheadRecord(
                suite="overhead",
                method=name,
                stages=num_stages,
                microbatches=num_microbatches,
                cpu_us_per_action=thread / actions,
                cpu_us_per_compute_action=thread / compute,
                cpu_us_all_threads_per_action=process / actions,
                bare_us=float(bare[0]) / (2 * num_microbatches * num_stages),
            )
        )
    return records


if __name__ == "__main__":
    _worker(job_of_arguments())
