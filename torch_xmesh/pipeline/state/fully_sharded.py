"""Stages whose parameters FSDP2 (``torch.distributed.fsdp.fully_shard``) shards, also over the stage's data axis.

FSDP2 gathers parameters before they are used, and reduces gradients to averages after each backward. A pipeline runs
many backwards in a step and wants sums: here FSDP2 is told to add up the microbatches' gradients on every rank, and to
reduce what they add up to once, at the end of the step.
"""

import dataclasses
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
    """A module on which `fully_shard` was called."""

    stage: int
    module: "FSDPModule"
    is_over_data: bool  # it shards over the stage's data axis


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
        self._meshes = meshes
        self._units: list[_Unit] = []
        self.parameters: dict[nn.Parameter, str] = {}
        self._together: list[TrainedTogether] = []
        for stage, module in sorted(modules.items()):
            found = _managed(module)
            units = [_unit(stage, meshes[stage], one, name) for one, name in found.items()]
            self._units.extend(units)
            mine = _parameters_of([unit.module for unit in units if unit.is_over_data])
            named = [
                (f"{name} of stage {stage}", p)
                for name, p in sorted(module.named_parameters(), key=lambda one: one[0])
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
            ValueError: ranks train other parameters.
        """
        for together in self._together if is_sync else ():
            together.end()
        for unit in self._units:
            unit.module.set_requires_gradient_sync(is_sync, recurse=False)
            unit.module.set_is_last_backward(True)
            unit.module.set_reshard_after_backward(True, recurse=False)
        for unit in self._units:
            state = unit.module._get_fsdp_state()
            if state._is_root:  # what autograd calls at the end of a backward: reduces in all modules below
                state._root_post_backward_final_callback()

    def release(self) -> None:
        """Frees the gathered parameters: the next use gathers what an optimizer has made of them."""
        for unit in self._units:
            unit.module.reshard()


def _managed(module: nn.Module) -> dict[Any, str]:
    """The modules on which `fully_shard` was called, with their names; none if nobody has imported it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return {}
    return {one: name for name, one in module.named_modules() if isinstance(one, fsdp.FSDPModule)}


def _unit(stage: int, mesh: StageMesh, module: "FSDPModule", name: str) -> _Unit:
    """A module, its gradients summed over the data axis, if it shards over that.

    Raises:
        ValueError: it shards over a part of the data axis.
    """
    line = set(mesh.line.ranks)
    groups = _groups_of(module)
    if not groups:
        return _Unit(stage, module, is_over_data=False)
    ranks = set(mesh_grid(groups[0].mesh_info.mesh).ranks)
    shared = line & ranks
    if len(shared) == 1:
        return _Unit(stage, module, is_over_data=False)
    if shared != line:
        raise ValueError(
            f"module {name or 'root'} of stage {stage} is fully sharded over ranks {sorted(ranks)}, which are a part "
            f"of its data axis, ranks {sorted(line)}: shard over all of it (fully_shard with a mesh of two axes "
            "replicates over the first), or choose another data_axis"
        )
    module.set_gradient_divide_factor(len(ranks) / len(line))  # other ranks of these have gradients that are equal
    module.set_force_sum_reduction_for_comms(True)
    return _Unit(stage, module, is_over_data=True)


def _groups_of(module: "FSDPModule") -> list[Any]:
    """What FSDP2 gathers and reduces together; newer versions of torch allow several to a module."""
    state: Any = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    return list(several) if several is not None else [one for one in (state._fsdp_param_group,) if one is not None]


def _parameters_of(modules: Collection["FSDPModule"]) -> set[nn.Parameter]:
    return {one.sharded_param for module in modules for group in _groups_of(module) for one in group.fsdp_params}


def _reshards_after_forward(module: "FSDPModule") -> bool:
    return any(group._reshard_after_forward for group in _groups_of(module))
