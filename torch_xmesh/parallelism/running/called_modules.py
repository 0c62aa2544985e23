"""Modules that are called as one: those that cannot be looked into, and those that have a row."""

import copy
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from torch_xmesh.parallelism.operators import Recorded
from torch_xmesh.pipeline.state.gradient_sync import local_of

OWN = "self."
"""What a parameter's name begins with where it is an argument: no other argument's does."""


def names_called(recorded: Recorded, operators: Collection[str] | None = None) -> list[str]:
    """The modules that operators of these names call as one; by default all."""
    pairs = zip(recorded.forward.operators, recorded.sites, strict=True)
    nodes = (site.node for operator, site in pairs if operators is None or operator.name in operators)
    return [*dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module")]


def called_modules(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Copies of modules, by name. Their parameters have no memory: calls bring them. Their buffers are copied, one that
    several share once."""
    modules = {name: model.get_submodule(name) for name in names}
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for module in modules.values()
        for parameter in module.parameters()
    }
    return {name: copy.deepcopy(module, memo) for name, module in modules.items()}


def check_buffers(model: nn.Module, recorded: Recorded, by_stage: Sequence[Collection[str]]) -> None:
    """Raises ValueError for a buffer of modules called as one on several stages, by the operators of each: their copies
    could not change it together."""
    stage_of: dict[int, int] = {}
    varying = {operator.name for operator in recorded.forward.operators if not operator.is_constant}
    for stage, names in enumerate(by_stage):
        varied = varying.intersection(names)
        for name in names_called(recorded, varied):
            for key, buffer in model.get_submodule(name).named_buffers():
                if stage_of.setdefault(id(buffer), stage) != stage:
                    raise ValueError(f"buffer {name}.{key} is in modules called as one on several stages")


class CalledModule:
    """A module as a function of its arguments and of its parameters: these are named as in the module, behind OWN."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = {key.removeprefix(OWN): argument for key, argument in kwargs.items() if key.startswith(OWN)}
        others = {key: argument for key, argument in kwargs.items() if not key.startswith(OWN)}
        buffers = {key: local_of(buffer) for key, buffer in self.module.named_buffers() if isinstance(buffer, DTensor)}
        return functional_call(self.module, own | buffers, args, others)
