"""The engines under measurement, ours and torch.distributed.pipelining, behind one interface."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble

import torch_xmesh as xm
from parts.pipeline.by_hand import ByHand
from parts.pipeline.method import Grid, Groups, Method, flat, named_gradients
from parts.pipeline.models import Workload

OURS = {
    "1f1b": ("1f1b", True),
    "eager_1f1b": ("eager_1f1b", True),
    "interleaved_1f1b": ("interleaved_1f1b", True),
    "zb_h1": ("zb_h1", True),
    "eager_split": ("eager_split", True),
    "auto": ("auto", True),
    "auto_held": ("", True),
    "broadcast": ("1f1b", False),
}
"""Name to schedule and overlap; "broadcast" is the paper's name for 1F1B whose senders wait for what they send,
"auto_held" runs what `held_schedule` chooses."""

INTERLEAVED = frozenset({"interleaved_1f1b"})
"""Methods with two stages on each mesh."""


def held_schedule(costs: xm.Costs, num_stages: int, num_microbatches: int) -> tuple[xm.Schedule, bool]:
    """What "auto" would choose if no stage might have more microbatches in flight than there are stages: torch_zb1p's
    peak; and whether its W may run early."""
    choice = xm.choose_schedule(costs, num_stages=num_stages, num_microbatches=num_microbatches)
    held = [one for one in choice.candidates if max(one.schedule.peak_in_flight) <= num_stages]
    best = min(held, key=lambda one: one.noisy_seconds)
    return best.schedule, best.early_weights


def ranks_of_groups(name: str, grids: Sequence[Grid]) -> list[tuple[int, ...]]:
    """The groups that a method needs; every rank of the cluster makes them in this order."""
    if name in OURS:
        return []
    meshes = [tuple(flat(grid)) for grid in grids]
    columns = list(zip(*meshes, strict=len({len(mesh) for mesh in meshes}) == 1))
    return [*columns, *(mesh for mesh in meshes if len(mesh) > 1)]


class Ours(Method):
    """torch_xmesh's engine on the captured model."""

    blocks_receiver = False

    def __init__(self, name: str, workload: Workload, grids: Sequence[Grid], costs: xm.Costs) -> None:
        super().__init__(workload)
        schedule: xm.Schedule | str
        schedule, self.is_overlapped = OURS[name]
        early_weights = True
        if name == "auto_held":
            schedule, early_weights = held_schedule(costs, len(grids), workload.num_microbatches)
        self._engine = xm.PipelineEngine(
            workload.model,
            workload.example,
            meshes=[xm.Mesh(grid) for grid in grids],
            split=xm.split_at(*workload.split),
            schedule=schedule,
            num_microbatches=workload.num_microbatches,
            loss_fn=workload.loss_fn,
            overlap=self.is_overlapped,
            early_weights=early_weights,
        )
        self.schedule, self.early_weights = self._engine.schedule, self._engine.early_weights

    def step(self) -> None:
        self._engine.step(*self.workload.args, target=self.workload.target, return_outputs=False)
        # "auto" chooses after its first step
        self.schedule, self.early_weights = self._engine.schedule, self._engine.early_weights

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: parameter.grad for name, parameter in self._engine.named_parameters()}

    def timeline(self, path: str) -> None:
        """Draws the last step. Called by all ranks of the meshes."""
        self._engine.timeline(path)

    def close(self) -> None:
        self._engine.close()


class Torch(Method):
    """torch.distributed.pipelining on gloo, one stage per rank, stages cut by hand."""

    def __init__(self, name: str, workload: Workload, grids: Sequence[Grid], groups: Groups) -> None:
        super().__init__(workload)
        self._index = [list(grid) for grid in grids].index([dist.get_rank()])
        self._is_last = self._index + 1 == len(grids)
        self._module = workload.stages[self._index]
        group = groups[tuple(flat(grid)[0] for grid in grids)]
        stage = PipelineStage(self._module, self._index, len(grids), torch.device("cpu"), group=group)
        make = {"torch_1f1b": Schedule1F1B, "torch_zb1p": ScheduleInterleavedZeroBubble}[name]
        stages: Any = stage if name == "torch_1f1b" else [stage]
        self._torch_schedule = make(stages, workload.num_microbatches, loss_fn=workload.loss_fn)
        self.is_overlapped = name != "torch_1f1b"  # its 1F1B waits for each exchange before it computes on
        if name == "torch_1f1b":
            self.schedule = xm.Schedule.make("1f1b", len(grids), workload.num_microbatches)
        else:
            self.schedule = xm.Schedule.from_csv(_csv(self._torch_schedule.pipeline_order), name=name)

    def step(self) -> None:
        if self._index == 0:
            self._torch_schedule.step(*self.workload.args, return_outputs=False)
        elif self._is_last:
            self._torch_schedule.step(target=self.workload.target, losses=[], return_outputs=False)
        else:
            self._torch_schedule.step(return_outputs=False)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return named_gradients(self.workload, self._module)


def _csv(order: dict[int, list[Any]]) -> str:
    rows = (["" if action is None else str(action) for action in order[rank]] for rank in sorted(order))
    return "\n".join(",".join(row) for row in rows)


def make_method(
    name: str, workload: Callable[[bool], Workload], grids: Sequence[Grid], groups: Groups, costs: xm.Costs
) -> Method:
    """A method by name. `workload(is_interleaved)` makes a fresh model; `groups` has those of `ranks_of_groups`;
    `costs` are what was measured, equal on all ranks. Called by every rank of the meshes.

    Raises ValueError for an unknown name.
    """
    if name in OURS:
        is_interleaved = name in INTERLEAVED
        return Ours(name, workload(is_interleaved), [*grids, *grids] if is_interleaved else grids, costs)
    if name in ("torch_1f1b", "torch_zb1p"):
        return Torch(name, workload(False), grids, groups)
    if name == "by_hand":
        by_hand: Method = ByHand(workload(False), grids, groups)
        return by_hand
    raise ValueError(f"unknown method {name!r}")
