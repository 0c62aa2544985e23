"""A split backward through modules that reduce gradients themselves: right, or whole with the reason."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_xmesh as xm
from torch_xmesh.testing import spawn


class Given:
    """An argument that is no container of torch's."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class TakesGiven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, given: Given) -> torch.Tensor:
        return self.inner(given.x)  # type: ignore[no-any-return]


WRAPPED: dict[str, tuple[Callable[..., Any], str | None]] = {
    "ddp": (DistributedDataParallel, None),
    "ddp, unused": (functools.partial(DistributedDataParallel, find_unused_parameters=True), "_DDPSinkBackward"),
    "ddp, static": (functools.partial(DistributedDataParallel, static_graph=True), "_DDPSinkBackward"),
    "fsdp1": (
        functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True),
        "torch.distributed.fsdp",
    ),
    "fsdp2": (fully_shard, "torch.distributed.fsdp"),
}


def run(rank: int, world_size: int, name: str) -> None:
    wrap, reason = WRAPPED[name]
    torch.manual_seed(0)
    model = TakesGiven()
    models = [wrap(copy.deepcopy(model)) for _ in range(2)]
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        x, grad = torch.randn(3, 4), torch.randn(3, 4)
        found: list[list[Any]] = []
        for index, one in enumerate(models):
            leaf = x.clone().requires_grad_()
            output = one(Given(leaf))
            if index == 0:
                output.backward(grad)
                given = leaf.grad
            else:
                (given,), run_weight_grads = xm.split_backward(output, grad, leaf)
                run_weight_grads()
                whole = run_weight_grads.whole_because
                assert (whole is None) == (reason is None) or (name == "ddp, static" and step > 0)
                assert whole is None or reason is None or reason in whole
            found.append([given, *(parameter.grad for parameter in one.parameters())])
        for mine, theirs in zip(*found, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                mine, theirs = (one.to_local() if hasattr(one, "to_local") else one for one in (mine, theirs))
                assert torch.equal(mine, theirs)
    dist.barrier()


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped(name: str) -> None:
    spawn(run, 2, name, timeout=60)
