"""Models made at random train under plans made at random as one process does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from random_plans import Case, loss_of, random_case, random_input
from torch.distributed.tensor import DTensor

import torch_xmesh as xm
from torch_xmesh.testing import spawn


def whole_of(tensor: Any) -> torch.Tensor:
    out: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return out


def check(case: Case, seed: int) -> None:
    """Steps of two microbatches: the loss, the output, and all gradients; and what AdamW makes of these."""
    whole = copy.deepcopy(case.model)
    with xm.PipelineEngine(case.model, (case.x,), {"indices": case.indices}, plan=case.plan, loss_fn=loss_of) as engine:
        for number in range(2):  # gradients add up
            generator = torch.Generator().manual_seed(seed + number)
            x, indices = random_input(generator, 16)
            target = torch.randn(16, 16, 32, generator=generator, dtype=torch.float64)
            given = x.clone()
            made = engine.step(x, indices=indices, target=target)
            assert torch.equal(x, given), "the batch is the user's"
            output = whole(x, indices=indices)
            loss = loss_of(output, target)
            loss.backward()  # type: ignore[no-untyped-call]
            assert engine.last_loss() == pytest.approx(loss.item(), rel=1e-9)
            if made is not None:
                made[1]["mean"] = made[1]["mean"].mean()  # an entry per microbatch
                torch.testing.assert_close(made, output)
        for name, parameter in engine.named_parameters():
            expected = whole.get_parameter(name).grad
            if expected is None:
                assert parameter.grad is None or not whole_of(parameter.grad).any(), name
                parameter.grad = None
            else:
                torch.testing.assert_close(whole_of(parameter.grad), expected, rtol=1e-6, atol=1e-10, msg=name)
        for parameters in (list(engine.parameters()), list(whole.parameters())):
            if parameters:  # a stage may have none
                torch.optim.AdamW(parameters, 0.01, eps=1e-3).step()
        for name, parameter in engine.named_parameters():
            expected = whole.get_parameter(name).detach()
            torch.testing.assert_close(whole_of(parameter.detach()), expected, rtol=1e-6, atol=1e-8, msg=name)


def trains(rank: int, world_size: int, seeds: range) -> None:
    for seed in seeds:
        case = random_case(seed)
        try:
            check(case, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}\n{case.plan}") from error


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("first", [0, 20])
def test_random_plans_train_as_one_process(first: int) -> None:
    spawn(trains, 4, range(first, first + 20), timeout=300)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(40, 240, 40))
def test_many_random_plans_train_as_one_process(first: int) -> None:
    spawn(trains, 4, range(first, first + 40), timeout=900)
