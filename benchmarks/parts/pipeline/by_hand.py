"""What a person writes today for two stages on meshes of different size: torch.distributed.pipelining between the first
ranks of both stages, and gathers by hand inside the stages."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import torch_xmesh as xm
from parts.pipeline.method import Grid, Groups, Method, flat, named_gradients
from parts.pipeline.models import Workload

_TAG = 1000
"""Apart from those of torch's stages, which share the group."""


class _Gather(torch.autograd.Function):
    """The leader's half and the helper's half, [samples / 2, ...] each, as one batch on the leader."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, helper: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.helper, ctx.group = helper, group
        theirs = torch.empty_like(mine)
        dist.recv(theirs, helper, group=group, tag=_TAG)
        return torch.cat([mine, theirs])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        mine, theirs = grads[0].chunk(2)
        dist.send(theirs.contiguous(), ctx.helper, group=ctx.group, tag=_TAG)
        return mine.contiguous(), None, None


class _Scatter(torch.autograd.Function):
    """The leader's half of a batch; the other half goes to the helper."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, helper: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.helper, ctx.group = helper, group
        mine, theirs = whole.chunk(2)
        dist.send(theirs.contiguous(), helper, group=group, tag=_TAG)
        return mine.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        theirs = torch.empty_like(grads[0])
        dist.recv(theirs, ctx.helper, group=ctx.group, tag=_TAG)
        return torch.cat([grads[0], theirs]), None, None


class _GatherAll(torch.autograd.Function):
    """Both ranks' halves on both; each keeps its own half of the gradient, which both compute alike."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, index: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.index = index
        parts = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(parts, mine.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].chunk(2)[ctx.index].contiguous(), None, None


class _Then(nn.Module):
    """`first`, and the autograd function `last` with its further arguments behind it (or before it, if `is_before`)."""

    def __init__(self, stage: nn.Module, function: Any, arguments: tuple[Any, ...], is_before: bool) -> None:
        super().__init__()
        self.stage = stage
        self._function, self._arguments, self._is_before = function, arguments, is_before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved = self._function.apply(x, *self._arguments) if self._is_before else self.stage(x)
        result: torch.Tensor = self.stage(moved) if self._is_before else self._function.apply(moved, *self._arguments)
        return result


class ByHand(Method):
    """1F1B over two stages of one or two ranks each.

    Two ranks with one each: the first rank of the pair is torch's stage; the second, its helper, follows the same order
    of actions with its half of each microbatch, which the first one gathers or hands out over the host's loopback. Two
    with two: two pipelines side by side carry half a microbatch each, and the second stage's ranks, which compute the
    same, gather it from one another.
    """

    is_overlapped = False

    def __init__(self, workload: Workload, grids: Sequence[Grid], groups: Groups) -> None:
        super().__init__(workload)
        front, back = map(flat, grids)
        rank = dist.get_rank()
        self._stage = 0 if rank in front else 1
        mates = front if self._stage == 0 else back
        self._index = mates.index(rank)
        self._leader = mates[0]
        self._is_twofold = len(front) == len(back) == 2
        self._is_sharded = len(mates) == 2 and not (self._is_twofold and self._stage == 1)
        self.schedule = xm.Schedule.make("1f1b", 2, workload.num_microbatches)
        self._module = workload.stages[self._stage]
        self._args = [self._mine(value) for value in workload.args]
        self._target = self._mine(workload.target)
        column = self._index if self._is_twofold else 0
        self._torch_schedule: Any = None
        pipeline = None
        if self._is_twofold or self._index == 0:
            pipeline = groups[front[column], back[column]]
        self._pair: Any = groups.get(tuple(mates))
        if pipeline is not None:
            self._torch_schedule = self._make_torch_schedule(pipeline, mates)

    def _mine(self, batch: torch.Tensor) -> torch.Tensor:
        """This rank's samples of every microbatch, microbatch by microbatch."""
        if not self._is_sharded:
            return batch
        halves = batch.reshape(self.workload.num_microbatches, 2, -1, *batch.shape[1:])
        return halves[:, self._index].flatten(0, 1).clone(memory_format=torch.contiguous_format)

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """A half's loss counts half."""
        loss = self.workload.loss_fn(output, target)
        return loss / 2 if self._is_sharded else loss

    def _make_torch_schedule(self, group: dist.ProcessGroup, mates: list[int]) -> Any:
        module, is_first = self._module, self._stage == 0
        if self._is_twofold and not is_first:
            module = _Then(module, _GatherAll, (self._index, self._pair), is_before=True)
        elif self._is_sharded and not self._is_twofold:
            module = _Then(module, _Gather if is_first else _Scatter, (mates[1], self._pair), is_before=not is_first)
        whole = torch.empty_like(self.workload.example[0])  # every stage's values have its shape
        sent = whole.chunk(2)[0] if self._is_twofold else whole
        is_half_in = self._is_sharded and is_first
        taken = whole.chunk(2)[0] if is_half_in else sent
        made = sent if is_first else whole.chunk(2)[0] if self._is_sharded else whole
        stage = PipelineStage(
            module,
            self._stage,
            2,
            torch.device("cpu"),
            # From 2.15 on torch sends the gradients of what asks for them here.
            input_args=(taken.detach().requires_grad_(not is_first),),
            output_args=(made.detach().requires_grad_(),),
            group=group,
        )
        return Schedule1F1B(stage, self.workload.num_microbatches, loss_fn=self._loss)

    def step(self) -> None:
        if self._torch_schedule is None:
            self._help()
        elif self._stage == 0:
            self._torch_schedule.step(*self._args, return_outputs=False)
        else:
            self._torch_schedule.step(target=self._target, losses=[], return_outputs=False)
        if self._is_sharded:
            parameters = list(self._module.parameters())
            gradients = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
            dist.all_reduce(gradients, group=self._pair)
            parts = torch.split(gradients, [p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter)

    def _help(self) -> None:
        """The second rank's half of what its leader does, action by action."""
        count = self.workload.num_microbatches
        inputs, targets = self._args[0].chunk(count), self._target.chunk(count)
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for action in self.schedule.actions(self._stage):
            microbatch = int(action[2:])
            if action[1] == "F":
                kept[microbatch] = self._help_forward(inputs[microbatch], targets[microbatch])
            else:
                self._help_backward(*kept.pop(microbatch))
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                parameter.grad /= count

    def _help_forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._stage == 0:
            y = self._module(x)
            dist.send(y.detach(), self._leader, group=self._pair, tag=_TAG)
            return x, y
        x = torch.empty_like(x)
        dist.recv(x, self._leader, group=self._pair, tag=_TAG)
        x.requires_grad_()
        return x, self._loss(self._module(x), target)

    def _help_backward(self, x: torch.Tensor, root: torch.Tensor) -> None:
        if self._stage == 0:
            gradient = torch.empty_like(root)
            dist.recv(gradient, self._leader, group=self._pair, tag=_TAG)
            torch.autograd.backward(root, gradient)
        else:
            torch.autograd.backward(root)
            assert x.grad is not None
            dist.send(x.grad, self._leader, group=self._pair, tag=_TAG)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return named_gradients(self.workload, self._module)
