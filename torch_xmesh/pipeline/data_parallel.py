"""Gradients of one step over the ranks that hold the same parameters: summed over the data axis, and over tied stages.

Both are sums in a fixed order at a fixed place, the end of the step: every copy of a parameter gets the same bits.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from torch_xmesh.pipeline.boundary import Move, Transfers
from torch_xmesh.pipeline.dtensors import placements_on, waited
from torch_xmesh.pipeline.stage_mesh import StageMesh
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
    shape: tuple[int, ...]
    dtype: torch.dtype


class GradientSync:
    """Makes the gradients of one rank's parameters those of the whole batch.

    What `.grad` held before a step is set aside and added again: a step adds its own gradient whatever was there.
    """

    def __init__(
        self,
        transfers: Transfers,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        meshes: Sequence[StageMesh],
        tied: Sequence[Tied],
    ) -> None:
        self._transfers = transfers
        self._tied = [one for one in tied if len(one.holders) > 1]
        self._placements = {
            (one.name, stage): self._placements_of(one, stage, m) for one in tied for stage, m in one.holders
        }
        self._lines: dict[Mesh, list[nn.Parameter]] = {}
        lines: dict[int, tuple[int, Mesh]] = {}
        for stage, found in sorted(parameters.items()):
            line = meshes[stage].line
            for parameter in found:
                if not parameter.requires_grad:
                    continue
                _check_data_axis(parameter, meshes[stage], stage)
                if id(parameter) not in lines:
                    lines[id(parameter)] = stage, line
                    if meshes[stage].num_shards > 1:
                        self._lines.setdefault(line, []).append(parameter)
                elif lines[id(parameter)][1] != line:
                    raise ValueError(
                        f"stages {lines[id(parameter)][0]} and {stage} share a parameter of shape "
                        f"{tuple(parameter.shape)} and their ranks, but shard the batch otherwise: give both the "
                        "same mesh and data_axis"
                    )
        members = {id(p): p for found in parameters.values() for p in found if p.requires_grad}
        self._dtensors: list[nn.Parameter] = [p for p in members.values() if isinstance(p, DTensor)]
        self._buckets = [(line, bucket) for line, members in self._lines.items() for bucket in _buckets(members)]
        self._set_aside: dict[nn.Parameter, torch.Tensor] = {}
        self._is_synced = True

    def _placements_of(self, one: Tied, stage: int, mesh: StageMesh) -> tuple[Placement, ...]:
        """How a holder's copy lies on its mesh: the holder tells all."""
        mine = None
        if self._transfers.rank in mesh.ranks:
            if one.parameter is None:
                raise ValueError(f"tied parameter {one.name} is not among the parameters of stage {stage}'s module")
            mine = placements_on(mesh, one.parameter, f"tied parameter {one.name} of stage {stage}")
        told: tuple[Placement, ...] = self._transfers.broadcast(f"tied/{one.name}/{stage}/lies", mesh.ranks[0], mine)
        return told

    def _tied_move(self, one: Tied, start: int, end: int) -> Move:
        """From the copy of holder number `start` to that of holder number `end`."""
        (stage, src), (to, dst) = one.holders[start], one.holders[end]
        there, here = self._placements[one.name, stage], self._placements[one.name, to]
        return Move(one.shape, one.dtype, src.grid, there, dst.grid, here)

    @property
    def is_needed(self) -> bool:
        """Whether any parameter has copies with gradients of their own, or one that may lie otherwise than it."""
        return bool(self._buckets) or bool(self._tied) or bool(self._dtensors)

    def _parameters(self) -> list[nn.Parameter]:
        found = {id(p): p for _, bucket in self._buckets for p in bucket}
        found.update({id(one.parameter): one.parameter for one in self._tied if one.parameter is not None})
        return list(found.values())

    def begin_step(self) -> None:
        """Sets aside what is summed already."""
        for parameter in self._parameters():
            if self._is_synced:
                if parameter.grad is not None:
                    self._set_aside[parameter] = parameter.grad
                    parameter.grad = None
            elif parameter.grad is None:  # the user dropped the gradients of the steps before
                self._set_aside.pop(parameter, None)

    def end_step(self, is_sync: bool) -> None:
        """Sums the step's gradients, or leaves that to a later step."""
        self._is_synced = is_sync
        if not is_sync:
            return
        for dtensor in self._dtensors:
            settle_gradient(dtensor)
        for number, (line, bucket) in enumerate(self._buckets):
            self._sum_bucket(f"gradients/{number}", line, bucket)
        for one in self._tied:
            self._sum_tied(one)
        for parameter, held in self._set_aside.items():
            parameter.grad = held if parameter.grad is None else held.add_(parameter.grad)
        self._set_aside.clear()

    def _sum_bucket(self, lane: str, line: Mesh, bucket: Sequence[nn.Parameter]) -> None:
        """One flat sum; a count per parameter at its end tells whether anybody has a gradient at all."""
        locals_ = [local_of(p) for p in bucket]
        has = torch.tensor([p.grad is not None for p in bucket], dtype=locals_[0].dtype)
        parts = [
            torch.zeros_like(one).flatten() if p.grad is None else local_of(p.grad).reshape(-1)
            for p, one in zip(bucket, locals_, strict=True)
        ]
        total = self._transfers.sum(lane, torch.cat([*parts, has]), line)
        start = 0
        for index, (parameter, one) in enumerate(zip(bucket, locals_, strict=True)):
            summed = total[start : start + one.numel()].view(one.shape)
            start += one.numel()
            if total[index - len(bucket)] == 0:
                continue
            if parameter.grad is None:
                parameter.grad = _like(parameter, summed.clone())
            else:
                local_of(parameter.grad).copy_(summed)

    def _sum_tied(self, one: Tied) -> None:
        rank = self._transfers.rank
        _, owner = one.holders[0]
        parameter = one.parameter
        is_owner = rank in owner.ranks
        total = None
        if parameter is not None:
            total = (
                torch.zeros_like(local_of(parameter)) if parameter.grad is None else local_of(parameter.grad).detach()
            )
        for number, (stage, mesh) in enumerate(one.holders[1:], 1):
            if is_owner or rank in mesh.ranks:
                there = self._transfers.start(
                    f"tied/{one.name}/{stage}",
                    [self._tied_move(one, number, 0)],
                    [] if is_owner or total is None else [total],
                )
                if is_owner:
                    assert total is not None
                    total = total + there.wait()[0].reshape(total.shape)
                else:
                    there.wait()
        for number, (stage, mesh) in enumerate(one.holders[1:], 1):
            if is_owner or rank in mesh.ranks:
                back = self._transfers.start(
                    f"tied/{one.name}/{stage}/back",
                    [self._tied_move(one, 0, number)],
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


def _check_data_axis(parameter: nn.Parameter, mesh: StageMesh, stage: int) -> None:
    """Raises ValueError for a parameter that something else than this shards over the data axis."""
    if not isinstance(parameter, DTensor) or mesh.num_shards == 1:
        return
    shared = set(mesh_grid(parameter.device_mesh).ranks) & (set(mesh.line.ranks) - {mesh.rank})
    if shared:
        raise ValueError(
            f"a parameter of stage {stage} of shape {tuple(parameter.shape)} is a DTensor over ranks {sorted(shared)}, "
            "the stage's data axis: its gradients would be reduced twice (FSDP averages them where the pipeline sums); "
            "pass data_axis=None, or shard parameters over the other axes"
        )
