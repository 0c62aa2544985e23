"""Modules that are called as one: those that cannot be looked into, and those that have a row."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from torch_xmesh.parallelism.operators import Recorded

OWN = "self."
"""What a parameter's name begins with where it is an argument: no other argument's does."""


def without_values(module: nn.Module) -> nn.Module:
    """A copy whose parameters have no memory; calls bring them. Buffers are copied."""
    memo = {
        id(one): nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad) for one in module.parameters()
    }
    return copy.deepcopy(module, memo)


def called_modules(model: nn.Module, recorded: Recorded, numbers: Iterable[int]) -> dict[str, nn.Module]:
    """Copies without values of the modules that these operators call as one, by name."""
    nodes = (recorded.sites[number].node for number in numbers)
    names = dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module")
    return {name: without_values(model.get_submodule(name)) for name in names}


class CalledModule:
    """A module as a function of its arguments and of its parameters: these are named as in the module, behind OWN."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = {key.removeprefix(OWN): one for key, one in kwargs.items() if key.startswith(OWN)}
        others = {key: one for key, one in kwargs.items() if not key.startswith(OWN)}
        return functional_call(self.module, own, args, others)
