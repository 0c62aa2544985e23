"""Gradients of one step over the ranks that hold the same parameters: summed over the data axis, and over tied stages.

Both are sums in a fixed order at a fixed place, the end of the step: every copy of a parameter gets the same bits.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from torch_xmesh.pipeline.ranks.dtensors import placements_on, waited
from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.pipeline.state.trained import TrainedTogether
from torch_xmesh.plan_cache import Move
from torch_xmesh.spec import Mesh, mesh_grid

_BUCKET_BYTES = 25 << 20


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, or the tensor; its memory is there."""
    return waited(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """A parameter's or buffer's name without what torch.compile and activation checkpointing put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


Names = list[tuple[int, str]]


def ties_of(modules: Mapping[int, nn.Module]) -> list[Names]:
    """The names (stage, name) of each parameter that has several, within a stage or among a rank's stages."""
    names: dict[int, Names] = {}
    for stage, module in sorted(modules.items()):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append((stage, plain_name(name)))
    return [found for found in names.values() if len(found) > 1]


def check_ties(ties: Sequence[Names], modules: Mapping[int, nn.Module]) -> None:
    """Raises ValueError where names that were one parameter are two now: each would train on half of the gradient."""
    now = {
        (stage, plain_name(name)): parameter
        for stage, module in modules.items()
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    for names in ties:
        found = [(where, now[where]) for where in names if where in now]
        for where, parameter in found[1:]:
            if parameter is not found[0][1]:
                (first, name), (stage, other) = found[0][0], where
                raise ValueError(
                    f"{name} of stage {first} and {other} of stage {stage} were one parameter before parallelize and "
                    "are two after it: assign the one to the other there, or keep both as they are"
                )


def settle_gradient(parameter: nn.Parameter) -> None:
    """Gives a DTensor parameter's gradient the parameter's placements: sequence-parallel layers leave a Partial one."""
    grad = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)


@dataclasses.dataclass(frozen=True)
class Tied:
    """A parameter that several places hold: the first of them owns it.

    Attributes:
        name: for messages and lanes.
        holders: (stage, mesh) of one stage per place, ascending.
        parameter: this rank's, or None.
    """

    name: str
    holders: tuple[tuple[int, StageMesh], ...]
    parameter: nn.Parameter | None


@dataclasses.dataclass
class _Line:
    """This rank's parameters with copies on the other data shards, and the buckets of those that are trained."""

    stage: int
    mesh: Mesh
    together: TrainedTogether
    trained: tuple[bool, ...] = ()
    buckets: list[list[nn.Parameter]] = dataclasses.field(default_factory=list)

    def find_buckets(self) -> list[list[nn.Parameter]]:
        trained = self.together.end()
        if trained != self.trained:
            self.trained = trained
            self.buckets = _buckets([p for p, is_one in zip(self.together.parameters, trained, strict=True) if is_one])
        return self.buckets


@dataclasses.dataclass(frozen=True)
class _Unsummed:
    """What a step in no_sync left on a gradient that was there already.

    Attributes:
        summed: the gradient that was there, equal on all ranks that hold the parameter.
        own: this rank's gradient of the steps since, or None.
        shown: both together, as `.grad`.
        version: the version counter of the memory of `shown`.
    """

    summed: torch.Tensor
    own: torch.Tensor | None
    shown: torch.Tensor
    version: int


class GradientSync:
    """Makes the gradients of one rank's parameters those of the whole batch.

    What `.grad` held before a step is set aside and added again: a step adds its own gradient whatever was there. A
    parameter takes part while it requires grad, or has since the last sum. `tied` are the parameters of several places,
    `summed` those that come summed over the data axis, `refused` those that cannot be trained, and why.
    """

    def __init__(
        self,
        transfers: Transfers,
        parameters: Mapping[int, Mapping[str, nn.Parameter]],
        *,
        meshes: Sequence[StageMesh],
        tied: Sequence[Tied],
        summed: Collection[nn.Parameter] = (),
        refused: Mapping[nn.Parameter, str] | None = None,
    ) -> None:
        self._transfers = transfers
        self._names = {p: f"{name} of stage {k}" for k, named in parameters.items() for name, p in named.items()}
        self.tied = list(tied)
        self._lies = self._placements_of_tied()
        self._ties_together = [
            TrainedTogether(
                transfers,
                f"tied/{tie.name}/trained",
                Mesh(sorted({rank for _, mesh in tie.holders for rank in mesh.ranks})),
                [(f"tied parameter {tie.name}", tie.parameter)],
            )
            for tie in self.tied
            if tie.parameter is not None
        ]
        self._summed = set(summed)
        self._refused = dict(refused or {})  # why a parameter cannot be trained
        self._lines = self._lines_of(parameters, meshes)
        self._dtensors: list[nn.Parameter] = [p for p in self._names if isinstance(p, DTensor)]
        found = [p for line in self._lines for p in line.together.parameters]
        found += [tie.parameter for tie in self.tied if tie.parameter is not None]
        self._parameters = list(dict.fromkeys(found))
        self._trained: set[nn.Parameter] = set()  # since the last sum
        self._set_aside: dict[nn.Parameter, torch.Tensor] = {}
        self._unsummed: dict[nn.Parameter, _Unsummed] = {}
        self._is_synced = True
        self.check_step()

    def _lines_of(
        self, parameters: Mapping[int, Mapping[str, nn.Parameter]], meshes: Sequence[StageMesh]
    ) -> list[_Line]:
        stage_of: dict[nn.Parameter, int] = {}
        members: dict[Mesh, list[nn.Parameter]] = {}
        for stage, named in sorted(parameters.items()):
            line = meshes[stage].line
            for parameter in named.values():
                if parameter in self._summed:
                    continue
                if (why := _why_not_summed(parameter, meshes[stage], stage)) is not None:
                    self._refused[parameter] = why
                first = stage_of.setdefault(parameter, stage)
                if first == stage and meshes[stage].num_shards > 1:
                    members.setdefault(line, []).append(parameter)
                elif meshes[first].line != line:
                    self._refused[parameter] = (
                        f"stages {first} and {stage} share a parameter of shape {tuple(parameter.shape)} and their "
                        "ranks, but shard the batch otherwise: give both the same mesh and data_axis"
                    )
        return [
            _Line(stage, line, TrainedTogether(self._transfers, f"gradients/{stage}/trained", line, named))
            for line, found in members.items()
            for stage, named in [(stage_of[found[0]], [(self._names[p], p) for p in found])]
        ]

    def _placements_of_tied(self) -> dict[tuple[str, int], tuple[Placement, ...]]:
        """How each holder's copy lies on its mesh, which the holders tell all."""
        mine = {}
        for tie in self.tied:
            for stage, mesh in tie.holders:
                if self._transfers.rank not in mesh.ranks:
                    continue
                if tie.parameter is None:
                    raise ValueError(f"tied parameter {tie.name} is not among the parameters of stage {stage}'s module")
                placements = placements_on(mesh, tie.parameter, f"tied parameter {tie.name} of stage {stage}")
                mine[tie.name, stage] = placements, (tuple(tie.parameter.shape), tie.parameter.dtype)
        told = {}
        for others in self._transfers.gather("tied", mine) if self.tied else []:
            told.update(others)
        for tie in self.tied:
            kinds = {stage: told[tie.name, stage][1] for stage, _ in tie.holders}
            if len(set(kinds.values())) > 1:
                raise ValueError(f"tied parameter {tie.name} has other shapes or dtypes by stage: {kinds}")
        return {where: placements for where, (placements, _) in told.items()}

    def tied_move(self, tie: Tied, start: int, end: int) -> Move:
        """From the copy of holder number `start` to that of holder number `end`."""
        (stage, src), (to, dst) = tie.holders[start], tie.holders[end]
        there, here = self._lies[tie.name, stage], self._lies[tie.name, to]
        assert tie.parameter is not None
        meshes = [Mesh(mesh.whole, device_type=mesh.device.type) for mesh in (src, dst)]
        return Move.of(tie.parameter.shape, tie.parameter.dtype, (meshes[0], there), (meshes[1], here))

    @property
    def has_shards(self) -> bool:
        """Whether any parameter has copies on other data shards, or a gradient that may lie otherwise than it."""
        return bool(self._lines) or bool(self._dtensors)

    @property
    def has_tied(self) -> bool:
        """Whether any parameter is another place's too."""
        return bool(self._ties_together)

    def check_step(self) -> None:
        """Whether a step may begin; nothing is changed.

        Raises:
            ValueError: a parameter that was frozen till now cannot be trained, or a gradient was changed where its
                parts cannot be told apart.
        """
        for parameter, why in self._refused.items():
            if parameter.requires_grad:
                raise ValueError(why)
        for parameter, left in self._unsummed.items():
            grad = parameter.grad
            if grad is not None and not self._is_as_left(grad, left) and local_of(grad).any():
                raise ValueError(
                    f"the gradient of {self._names[parameter]} was changed after a step in no_sync that added to a sum "
                    "of earlier steps: which part of it is summed cannot be told; drop it (zero_grad), or change it "
                    "after a step outside no_sync"
                )

    def begin_step(self, is_sync: bool) -> None:
        """Sets aside what is summed already, and tells the other ranks what is trained if the step ends in a sum; after
        `check_step`."""
        for parameter in self._parameters:
            if parameter in self._unsummed:
                self._take_apart(parameter, self._unsummed.pop(parameter))
            elif self._is_synced and parameter.grad is not None:
                self._set_aside[parameter] = parameter.grad
                parameter.grad = None
        self._trained.update(parameter for parameter in self._parameters if parameter.requires_grad)
        if is_sync:
            for together in (*(line.together for line in self._lines), *self._ties_together):
                together.begin(self._trained)

    def _take_apart(self, parameter: nn.Parameter, left: _Unsummed) -> None:
        """Splits a gradient that a step in no_sync has left: what is summed already is set aside, and this rank's own
        part becomes the parameter's gradient."""
        grad = parameter.grad
        if grad is not None and self._is_as_left(grad, left):  # else the user dropped the gradients of the steps before
            self._set_aside[parameter] = grad if left.own is None else left.summed
            parameter.grad = left.own

    @staticmethod
    def _is_as_left(grad: torch.Tensor, left: _Unsummed) -> bool:
        return left.own is None or (grad is left.shown and local_of(grad)._version == left.version)

    def sum_shards(self) -> None:
        """Sums the step's gradients over the data axis.

        Raises:
            ValueError: ranks train other parameters.
        """
        for dtensor in self._dtensors:
            settle_gradient(dtensor)
        for line in self._lines:
            for number, bucket in enumerate(line.find_buckets()):
                self._sum_bucket(f"gradients/{line.stage}/{number}", line.mesh, bucket)

    def sum_tied(self) -> None:
        """Sums those of tied parameters over their places, after :meth:`sum_shards`; raises as that."""
        trained = {p for together in self._ties_together if together.end()[0] for p in together.parameters}
        for tie in self.tied:
            if tie.parameter in trained:
                self._sum_tied(tie)

    def end_step(self, is_sync: bool) -> None:
        """Adds what was there before the step; `is_sync`: the step's own gradients are summed."""
        self._is_synced = is_sync
        if not is_sync:
            self._show()
            return
        for parameter, held in self._set_aside.items():
            parameter.grad = held if parameter.grad is None else held.add_(parameter.grad)
        self._set_aside.clear()
        self._trained.clear()

    def _show(self) -> None:
        """Puts what was set aside back into `.grad`, beside what the step has added."""
        for parameter, summed in self._set_aside.items():
            settle_gradient(parameter)
            own = parameter.grad
            shown = parameter.grad = summed if own is None else summed + own
            self._unsummed[parameter] = _Unsummed(summed, own, shown, local_of(shown)._version)
        self._set_aside.clear()

    def _sum_bucket(self, lane: str, line: Mesh, bucket: Sequence[nn.Parameter]) -> None:
        """One flat sum; a count per parameter at its end tells whether anybody has a gradient at all."""
        locals_ = [local_of(p) for p in bucket]
        has = torch.tensor([p.grad is not None for p in bucket], dtype=locals_[0].dtype, device=locals_[0].device)
        parts = [
            torch.zeros_like(local).flatten() if p.grad is None else local_of(p.grad).reshape(-1)
            for p, local in zip(bucket, locals_, strict=True)
        ]
        total = self._transfers.sum(lane, torch.cat([*parts, has]), line)
        start, counts = 0, total[-len(bucket) :].tolist()
        for count, parameter, local in zip(counts, bucket, locals_, strict=True):
            summed = total[start : start + local.numel()].view(local.shape)
            start += local.numel()
            if count == 0:
                continue
            if parameter.grad is None:
                parameter.grad = _like(parameter, summed.clone())
            else:
                local_of(parameter.grad).copy_(summed)

    def _sum_tied(self, tie: Tied) -> None:
        rank = self._transfers.rank
        _, owner = tie.holders[0]
        parameter = tie.parameter
        is_owner = rank in owner.ranks
        total = None
        if parameter is not None:
            total = (
                torch.zeros_like(local_of(parameter)) if parameter.grad is None else local_of(parameter.grad).detach()
            )
        for number, (stage, mesh) in enumerate(tie.holders[1:], 1):
            if is_owner or rank in mesh.ranks:
                there = self._transfers.start(
                    f"tied/{tie.name}/{stage}",
                    [self.tied_move(tie, number, 0)],
                    [] if is_owner or total is None else [total],
                )
                if is_owner:
                    assert total is not None
                    total = total + there.wait()[0].reshape(total.shape)
                else:
                    there.wait()
        for number, (stage, mesh) in enumerate(tie.holders[1:], 1):
            if is_owner or rank in mesh.ranks:
                back = self._transfers.start(
                    f"tied/{tie.name}/{stage}/back",
                    [self.tied_move(tie, 0, number)],
                    [total] if is_owner and total is not None else [],
                )
                received = back.wait()
                if not is_owner:
                    total = received[0]
        if parameter is not None:
            assert total is not None
            parameter.grad = _like(parameter, total.reshape(local_of(parameter).shape))


def _like(parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of one dtype in a row, up to the size of a bucket."""
    buckets: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        num_bytes = local_of(parameter).numel() * parameter.element_size()
        if not buckets or buckets[-1][0].dtype != parameter.dtype or filled + num_bytes > _BUCKET_BYTES:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += num_bytes
    return buckets


def _why_not_summed(parameter: nn.Parameter, mesh: StageMesh, stage: int) -> str | None:
    """Why a parameter cannot be trained: something other than the engine shards it over the data axis. None if it can
    be trained."""
    if not isinstance(parameter, DTensor) or mesh.num_shards == 1:
        return None
    shared = set(mesh_grid(parameter.device_mesh).ranks) & (set(mesh.line.ranks) - {mesh.rank})
    if not shared:
        return None
    return (
        f"a parameter of stage {stage} of shape {tuple(parameter.shape)} is a DTensor over ranks {sorted(shared)}, "
        "the stage's data axis, where nobody sums its gradients: shard it with fully_shard or over the other axes, or "
        "pass data_axis=None"
    )
