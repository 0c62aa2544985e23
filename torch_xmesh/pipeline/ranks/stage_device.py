"""The device that each stage of a pipeline computes on: that of its tensors, or of its mesh."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from torch_xmesh.devices import check_current, device_here, device_of, is_device_here
from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.spec import device_type_of


def on_devices(transfers: Transfers, meshes: Sequence[StageMesh], modules: Mapping[int, nn.Module]) -> list[StageMesh]:
    """The meshes with their stages' devices. Called by all ranks, each with the modules of its stages.

    A stage is where its parameters and buffers are; one whose tensors are on the meta device, or that has none, where
    its mesh's device type says; if that says nothing, where the stage before is, and the first one where the next is.

    Raises:
        ValueError: a stage's tensors are on several devices, on another kind than its mesh says, or than on another
            rank; this rank has no such device, or stages on several of one kind; two of its stages that are on other
            devices than each other share a parameter.
    """
    held = {stage: device_of(module, f"stage {stage}") for stage, module in modules.items()}
    mine = {stage: device.type for stage, device in held.items() if device is not None}
    said = {stage: kind for stage, mesh in enumerate(meshes) if (kind := device_type_of(mesh.mesh)) is not None}
    told = dict(zip(transfers.ranks, transfers.gather("devices", (mine, said)), strict=True))
    found: list[str | None] = []
    for stage in range(len(meshes)):
        kind = _same({rank: on for rank, (on, _) in told.items()}, stage, "stage {} is on")
        of_mesh = _same({rank: says for rank, (_, says) in told.items()}, stage, "the mesh of stage {} is on")
        if kind is not None and of_mesh is not None and of_mesh != kind:
            raise ValueError(
                f"stage {stage}'s mesh is one of {of_mesh} devices, its parameters are on {kind}: move the module "
                f'there before, as model.to("{of_mesh}") does, or make it on the meta device'
            )
        found.append(kind or of_mesh)
    kinds_of_stages = _filled(found)
    placed = []
    for stage, (mesh, kind) in enumerate(zip(meshes, kinds_of_stages, strict=True)):
        is_here = transfers.rank in mesh.ranks
        device = held.get(stage) or (_own_device(kind, stage, transfers.rank) if is_here else torch.device(kind))
        placed.append(mesh.on_device(device))
    _check_own([placed[stage].device for stage in modules], transfers.rank)
    _check_ties({stage: (module, placed[stage].device) for stage, module in modules.items()})
    return placed


def device_of_meshes(meshes: Sequence[StageMesh]) -> torch.device | None:
    """Where a model on the meta device will run, as far as this process has such a device: on the first kind of
    accelerator that a mesh names."""
    said = (device_type_of(mesh.mesh) for mesh in meshes)
    kind = next((kind for kind in said if kind not in (None, "cpu") and is_device_here(kind)), None)
    return None if kind is None else device_here(kind)


def _same(by_rank: Mapping[int, Mapping[int, str]], stage: int, what: str) -> str | None:
    """What all ranks say of a stage that say something."""
    found = [(rank, said[stage]) for rank, said in by_rank.items() if stage in said]
    for rank, kind in found[1:]:
        if kind != found[0][1]:
            text = f"{what.format(stage)} {found[0][1]} on rank {found[0][0]} and on {kind} on rank {rank}"
            raise ValueError(f"ranks disagree on devices: {text}")
    return found[0][1] if found else None


def _filled(found: Sequence[str | None]) -> list[str]:
    """By stage its kind of device: where none is known, that of the nearest stage before, or else behind."""
    known = next((kind for kind in found if kind is not None), "cpu")
    out = []
    for kind in found:
        known = kind or known
        out.append(known)
    return out


def _own_device(kind: str, stage: int, rank: int) -> torch.device:
    """Where a stage of this rank is to be that is on a kind of device."""
    if kind != "cpu" and not is_device_here(kind):
        raise ValueError(f"stage {stage} is to be on a {kind} device, and rank {rank} has none")
    return device_here(kind)


def _check_own(devices: Sequence[torch.device], rank: int) -> None:
    """Raises ValueError where this rank's stages are not all on its current device, or on cpu."""
    for device in devices:
        check_current(device, f"a stage of rank {rank}")


def _check_ties(stages: Mapping[int, tuple[nn.Module, torch.device]]) -> None:
    """Raises ValueError where a parameter would have to be on two devices of this rank."""
    seen: dict[int, tuple[int, torch.device]] = {}
    for stage, (module, device) in stages.items():
        for name, parameter in module.named_parameters():
            first, there = seen.setdefault(id(parameter), (stage, device))
            if there != device:
                raise ValueError(
                    f"stages {first} and {stage} of one rank share parameter {name}, and are on {there} and {device}: "
                    "put them on one kind of device, or on other ranks"
                )
