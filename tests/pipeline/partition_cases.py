"""What the tests of partitions share: every model of the zoo with each of its splits, and comparisons."""

import copy
from typing import Any

import pytest
import torch
from models import Case, cases
from torch import nn
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.cut.partition import Partition, partition, split_at

SPLITS = [pytest.param(case, names, id=f"{case.name}-{'-'.join(names)}") for case in cases() for names in case.splits]


def cut(case: Case, model: nn.Module, names: tuple[str, ...], samples: int = 3) -> Partition:
    args, kwargs, _ = case.batch(samples)
    return partition(model, args, kwargs, split_at(*names), args_chunk_spec=case.specs.get("args_chunk_spec"))


def twin(case: Case, model: nn.Module) -> nn.Module:
    """The same model once more; hooks are bound to the module that they were made for, so that one is made anew."""
    if case.name != "hooks":
        return copy.deepcopy(model)
    made = case.build()
    made.load_state_dict(model.state_dict())
    return made


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(one: Any, other: Any) -> None:
    flat, structure = pytree.tree_flatten(one)
    flat_other, structure_other = pytree.tree_flatten(other)
    assert structure == structure_other
    for mine, theirs in zip(flat, flat_other, strict=True):
        assert isinstance(mine, torch.Tensor) == isinstance(theirs, torch.Tensor)
        if isinstance(mine, torch.Tensor):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
        else:
            assert mine == theirs
