"""One rank's stages as a user, an optimizer and a checkpoint see them: modules, and parameters under the model's
names."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from torch_xmesh.arguments import instance_of
from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.pipeline.state.checkpoint import (
    load_model_state,
    load_optimizer_state,
    model_state,
    names_of_optimizer_state,
    stage_state_names,
    unknown_names,
)
from torch_xmesh.pipeline.state.gradient_sync import Tied
from torch_xmesh.pipeline.state.training import OwnParameter, is_counted


@dataclasses.dataclass
class OwnStages:
    """The stages of one rank.

    Attributes:
        rank: this rank.
        meshes: the mesh of every stage of the pipeline.
        modules: by stage of this rank.
        named: by stage of this rank, its parameters by name.
        tied: parameters that several stages share.
        names_stages: parameters are named after their stage, since the model came as a list.
        unused: the model's parameters that no stage has, and their mesh, on the first stage's ranks.
        unset: tensors of a model on meta that still have no values, by name.
        model_names: names of the state of the model that was given, without what `parallelize` has put into it.
        is_training: what the engine was last told, of all its stages.
    """

    rank: int
    meshes: Sequence[StageMesh]
    modules: Mapping[int, nn.Module]
    named: Mapping[int, Mapping[str, nn.Parameter]]
    tied: Sequence[Tied]
    names_stages: bool
    unused: Mapping[str, tuple[nn.Parameter, StageMesh]]
    unset: dict[str, torch.Tensor]
    model_names: frozenset[str]
    is_training: bool = True

    def module(self, stage: int) -> nn.Module:
        """Raises ValueError for another rank's stage."""
        if not isinstance(stage, int) or stage not in self.modules:
            raise ValueError(f"stage {stage} is not on rank {self.rank}, which has stages {list(self.modules)}")
        return self.modules[stage]

    def _parameters(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        """Stage, full name and parameter; one that several stages share comes with the first of them."""
        seen: set[int] = set()
        for stage, named in self.named.items():
            for name, parameter in named.items():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield stage, f"{stage}.{name}" if self.names_stages else name, parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Under the model's own names ("0.weight" for stage 0 of a list of modules)."""
        for _, name, parameter in self._parameters():
            yield name, parameter

    def own_parameters(self) -> list[OwnParameter]:
        """With their meshes, and which of them count here in a norm of the whole model."""
        lent = {id(tie.parameter) for tie in self.tied if tie.holders[0][0] not in self.modules}
        return [
            OwnParameter(
                name,
                parameter,
                self.meshes[stage],
                id(parameter) not in lent and is_counted(parameter, self.meshes[stage]),
            )
            for stage, name, parameter in self._parameters()
        ]

    def train(self, mode: bool) -> None:
        """Training or evaluation mode."""
        self.is_training = mode
        for module in self.modules.values():
            module.train(mode)

    def state(self) -> dict[str, Any]:
        """Parameters and buffers as DTensors."""
        return model_state(self._prefixed(), self.unused)

    def load(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None) -> list[Callable[[], None]]:
        """What copies what `state` gives, or with an optimizer what PipelineEngine.state_dict does; all is checked.

        Raises:
            ValueError: a key is missing or has another shape.
        """
        instance_of("state", state, Mapping, "a dict of what state_dict() gave")  # type: ignore[type-abstract]
        if optimizer is None:
            return [load_model_state(self._prefixed(), self.unused, state)]
        instance_of("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer or None")
        if missing := [key for key in ("model", "optimizer", "step") if key not in state]:
            raise ValueError(
                f"the state has no {missing[0]!r}, but {sorted(state)[:5]}: with an optimizer, load what "
                "state_dict(optimizer) gave"
            )
        return [
            load_model_state(self._prefixed(), self.unused, state["model"]),
            load_optimizer_state(optimizer, self.own_parameters(), state["optimizer"]),
        ]

    def names(self) -> set[str]:
        """Those that a state may have: of the whole model as it was given, and of this rank's stages as they are."""
        return {*self.model_names, *stage_state_names(self._prefixed()), *self.unused}

    def strangers(self, state: Mapping[str, Any], has_optimizer: bool, known: Set[str]) -> str | None:
        """What to say of names in a state that `load` takes, which the model has not; None without any."""
        model = state["model"] if has_optimizer else state
        found = unknown_names(model, known, "the state dict")
        if found is None and has_optimizer:
            found = unknown_names(names_of_optimizer_state(state["optimizer"]), known, "the optimizer's state")
        return found

    def all_set(self) -> None:
        """Every tensor has values now."""
        self.unset.clear()

    def _prefixed(self) -> list[tuple[str, nn.Module, StageMesh]]:
        return [
            (f"{stage}." if self.names_stages else "", module, self.meshes[stage])
            for stage, module in self.modules.items()
        ]
