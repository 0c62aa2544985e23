"""Stages whose parameters FSDP2 (``torch.distributed.fsdp.fully_shard``) shards, also over the stage's data axis.

FSDP2 gathers parameters before they are used, and reduces gradients to averages after each backward. A pipeline runs
many backwards in a step and wants sums: here FSDP2 is told to add up the microbatches' gradients on every rank, and to
reduce what they add up to once, at the end of the step.
"""

import dataclasses
import itertools
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_xmesh.pipeline.cut.microbatch import shard_sizes
from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.pipeline.state.trained import TrainedTogether
from torch_xmesh.spec import mesh_grid

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


@dataclasses.dataclass(frozen=True)
class _Unit:
    """A module on which `fully_shard` was called.

    Attributes:
        name: in its stage.
        is_over_data: it shards over the stage's data axis.
    """

    stage: int
    name: str
    module: "FSDPModule"
    is_over_data: bool


class FullySharded:
    """The modules of one rank's stages that FSDP2 manages.

    Attributes:
        parameters: those whose gradients FSDP2 sums over the stage's data axis, as nobody else must.
    """

    def __init__(
        self,
        transfers: Transfers,
        modules: Mapping[int, nn.Module],
        meshes: Sequence[StageMesh],
    ) -> None:
        self._transfers, self._meshes = transfers, meshes
        self._units: list[_Unit] = []
        self.parameters: dict[nn.Parameter, str] = {}
        self._together: list[TrainedTogether] = []
        for stage, module in sorted(modules.items()):
            found = _managed(module)
            units = [_unit(stage, meshes[stage], submodule, name) for submodule, name in found.items()]
            self._units.extend(units)
            mine = _parameters_of([unit.module for unit in units if unit.is_over_data])
            named = [
                (f"{name} of stage {stage}", p)
                for name, p in sorted(module.named_parameters(), key=lambda pair: pair[0])
                if p in mine
            ]
            self.parameters.update((parameter, name) for name, parameter in named)
            if named:
                lane = f"gradients/{stage}/sharded"
                self._together.append(TrainedTogether(transfers, lane, meshes[stage].line, named))

    @property
    def is_needed(self) -> bool:
        """Whether there is any."""
        return bool(self._units)

    def check_samples(self, sizes: Sequence[int]) -> None:
        """Raises ValueError where a microbatch leaves a data shard without samples: all shards gather, or none."""
        for unit in self._units:
            shards = self._meshes[unit.stage].num_shards
            if unit.is_over_data and shard_sizes(min(sizes), shards)[-1] == 0:
                raise ValueError(
                    f"a microbatch of {min(sizes)} samples leaves a data shard of stage {unit.stage} without any, but "
                    "all of them gather what fully_shard has sharded: pass a multiple of "
                    f"{shards} samples per microbatch"
                )

    def used_by(self, stage: int, names: Collection[str]) -> list[str]:
        """What gathers parameters over data shards where a stage calls and reads what has these names."""
        found = [unit.name for unit in self._units if unit.is_over_data and unit.stage == stage]
        return sorted(unit for unit in found if any(_is_within(unit, name) or _is_within(name, unit) for name in names))

    def begin_step(self, is_sync: bool) -> None:
        """Backwards from now on keep their gradients to themselves; parameters stay gathered between microbatches where
        `fully_shard` was told not to reshard after forward."""
        trained = {parameter for parameter in self.parameters if parameter.requires_grad}
        for unit in self._units:
            unit.module.set_requires_gradient_sync(False, recurse=False)
            unit.module.set_is_last_backward(False)
            unit.module.set_reshard_after_backward(_reshards_after_forward(unit.module), recurse=False)
        for together in self._together if is_sync else ():
            together.begin(trained)

    def end_step(self, is_sync: bool) -> None:
        """Reduces what the step's backwards have added up; with `is_sync` False that waits for a later step.

        Raises:
            ValueError: ranks train other parameters, or some data shards have not used a module that others have.
        """
        for together in self._together if is_sync else ():
            together.end()
        for stage in dict.fromkeys(unit.stage for unit in self._units if is_sync and unit.is_over_data):
            self._complete(stage)
        for unit in self._units:
            unit.module.set_requires_gradient_sync(is_sync, recurse=False)
            unit.module.set_is_last_backward(True)
            unit.module.set_reshard_after_backward(True, recurse=False)
        for unit in self._units:
            state = unit.module._get_fsdp_state()
            if state._is_root:  # what autograd calls at the end of a backward: reduces in all modules below
                state._root_post_backward_final_callback()

    def _complete(self, stage: int) -> None:
        """FSDP2 reduces those gradients that a rank has, one behind the other, as if all ranks had the same: where a
        data shard has taken another way through the model, what it has not used gets a gradient of zeros."""
        units = [unit for unit in self._units if unit.is_over_data and unit.stage == stage]
        groups = [(unit, group.fsdp_params) for unit in units for group in _groups_of(unit.module)]
        there = [[int(_has_gradient(parameter)) for parameter in held] for _, held in groups]
        line = self._meshes[stage].line
        counts = [count for flags in there for count in (max(flags, default=0), *flags)]
        mine = torch.tensor(counts, device="cpu")
        told = iter(self._transfers.sum(f"gradients/{stage}/used", mine, line).tolist())
        for unit, held in groups:
            if 0 < next(told) < len(line.ranks):
                raise ValueError(f"module {unit.name!r} of stage {stage} {USED_BY_SOME}")
            for parameter, count in zip(held, itertools.islice(told, len(held)), strict=True):
                if count and not _has_gradient(parameter):
                    _give_zeros(parameter)

    def release(self) -> None:
        """Frees the gathered parameters: the next use gathers what an optimizer has made of them."""
        for unit in self._units:
            unit.module.reshard()


USED_BY_SOME = (
    "was used by some data shards and not by others, but fully_shard gathers its parameters over all of them: shard "
    "the module in which it is called instead"
)


def _is_within(name: str, outer: str) -> bool:
    return not outer or f"{name}.".startswith(f"{outer}.")


def _has_gradient(parameter: Any) -> bool:
    """Whether one of FSDP2's parameters has a gradient that is not reduced yet."""
    held = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (held is not None and held.grad is not None)


def _give_zeros(parameter: Any) -> None:
    held = parameter._unsharded_param
    zeros = torch.zeros_like(held)
    if parameter.reduce_dtype is None or parameter.reduce_dtype == zeros.dtype:
        held.grad = zeros
    else:
        parameter.unsharded_accumulated_grad = zeros.to(parameter.reduce_dtype)


def _managed(module: nn.Module) -> dict[Any, str]:
    """The modules on which `fully_shard` was called, with their names; none if nobody has imported it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return {}
    return {submodule: name for name, submodule in module.named_modules() if isinstance(submodule, fsdp.FSDPModule)}


def _unit(stage: int, mesh: StageMesh, module: "FSDPModule", name: str) -> _Unit:
    """A module, its gradients summed over the data axis, if it shards over that.

    Raises:
        ValueError: it shards over a part of the data axis.
    """
    line = set(mesh.line.ranks)
    groups = _groups_of(module)
    if not groups:
        return _Unit(stage, name, module, is_over_data=False)
    ranks = set(mesh_grid(groups[0].mesh_info.mesh).ranks)
    shared = line & ranks
    if len(shared) == 1:
        return _Unit(stage, name, module, is_over_data=False)
    if shared != line:
        raise ValueError(
            f"module {name or 'root'} of stage {stage} is fully sharded over ranks {sorted(ranks)}, which are a part "
            f"of its data axis, ranks {sorted(line)}: shard over all of it (fully_shard with a mesh of two axes "
            "replicates over the first), or choose another data_axis"
        )
    module.set_gradient_divide_factor(len(ranks) / len(line))  # other ranks of these have gradients that are equal
    module.set_force_sum_reduction_for_comms(True)
    return _Unit(stage, name, module, is_over_data=True)


def _groups_of(module: "FSDPModule") -> list[Any]:
    """What FSDP2 gathers and reduces together; newer versions of torch allow several to a module."""
    state: Any = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    return (
        list(several) if several is not None else [group for group in (state._fsdp_param_group,) if group is not None]
    )


def _parameters_of(modules: Collection["FSDPModule"]) -> set[nn.Parameter]:
    return {
        parameter.sharded_param for module in modules for group in _groups_of(module) for parameter in group.fsdp_params
    }


def _reshards_after_forward(module: "FSDPModule") -> bool:
    return any(group._reshard_after_forward for group in _groups_of(module))
