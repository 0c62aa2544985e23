"""Parameters that are frozen and unfrozen between steps, and gradients that are dropped or changed between them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from pipeline_cases import compare
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step, spawn


class Layers(nn.Module):
    """The last layer may have the first one's weight."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        if is_tied:
            self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))  # type: ignore[no-any-return]


class Trained:
    """A model whose first stage, two layers, has two data shards; and the same model in one process."""

    def __init__(self, is_tied: bool = False, frozen: tuple[str, ...] = ()) -> None:
        torch.manual_seed(0)
        self.model = Layers(is_tied)
        self.freeze(*frozen)
        self.reference = copy.deepcopy(self.model)
        self.engine = xm.PipelineEngine(
            self.model,
            (torch.empty(2, 4),),
            meshes=[xm.Mesh([0, 1]), xm.Mesh([2])],
            split=xm.split_at("third"),
            num_microbatches=2,
            loss_fn=F.mse_loss,
        )
        self.count = 0

    def freeze(self, *names: str, frozen: bool = True) -> None:
        for model in (self.model, getattr(self, "reference", self.model)):
            for name in names:
                model.get_parameter(name).requires_grad_(not frozen)

    def zero_grad(self, set_to_none: bool) -> None:
        for parameters in (self.engine.parameters(), self.reference.parameters()):
            torch.optim.SGD(parameters, 0.1).zero_grad(set_to_none)

    def step(self, is_sync: bool = True) -> None:
        """A step of both; compares if gradients are summed."""
        torch.manual_seed(self.count)
        self.count += 1
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        losses: list[torch.Tensor] = []
        if is_sync:
            output = self.engine.step(x, target=y, losses=losses)
        else:
            with self.engine.no_sync():
                output = self.engine.step(x, target=y, losses=losses)
        expected = serial_step(
            self.reference, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=2, num_data_shards=2
        )
        if is_sync:
            compare(self.engine, self.reference, expected, output, losses, f"step {self.count}")

    def refused(self) -> str:
        dist.barrier()  # a failure ends what others are still at
        with pytest.raises(ValueError) as caught:
            self.step()
        self.engine.close()
        return str(caught.value)


def unfreeze(rank: int, world_size: int, is_tied: bool) -> None:
    weight, other = "first.weight", "second.weight"
    trained = Trained(is_tied, (weight,))
    trained.step()
    trained.freeze(weight, frozen=False)
    trained.step()
    trained.freeze(weight)
    trained.freeze(other)
    trained.step()  # the gradients of the step before stay
    trained.zero_grad(True)
    trained.step()
    assert all(trained.model.get_parameter(name).grad is None for name in (weight, other))
    trained.freeze(weight, other, frozen=False)
    trained.step(is_sync=False)
    trained.freeze(weight)  # its gradient is not summed yet
    trained.step()
    trained.engine.close()


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_unfrozen_after_the_engine_was_made(is_tied: bool) -> None:
    spawn(unfreeze, 3, is_tied, timeout=60)


def unfreeze_one_copy(rank: int, world_size: int, is_tied: bool, where: int) -> str:
    trained = Trained(is_tied, ("first.weight",))
    trained.step()
    if rank == where:
        trained.freeze("first.weight", frozen=False)
    return trained.refused()


@pytest.mark.parametrize(
    ("is_tied", "where", "text"),
    [
        (False, 1, "first.weight of stage 0 requires grad on 1 of the 2 ranks [0, 1]"),
        (True, 2, "tied parameter first.weight requires grad on 1 of the 3 ranks [0, 1, 2]"),
    ],
    ids=["data shards", "tied stages"],
)
def test_unfrozen_on_some_ranks_only(is_tied: bool, where: int, text: str) -> None:
    for value in spawn(unfreeze_one_copy, 3, is_tied, where, timeout=60):
        assert text in value


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [model.get_parameter(name).grad for name in ("first.weight", "second.bias")]
    return [torch.zeros(4, 4) if grad is None else grad.clone() for grad in found]


def drop(rank: int, world_size: int, is_tied: bool) -> None:
    """A sum, then a step in no_sync: `.grad` has both, and zeroing or dropping it leaves nothing of either."""
    trained = Trained(is_tied)
    for set_to_none in (False, True):
        trained.step()
        trained.step(is_sync=False)
        trained.zero_grad(set_to_none)
        trained.step()
        trained.zero_grad(set_to_none)
    trained.step()
    summed = gradients(trained.reference)
    trained.step(is_sync=False)
    for before, after, mine in zip(summed, gradients(trained.reference), gradients(trained.model), strict=True):
        own = mine - before if rank < 2 else torch.zeros_like(before)
        if not is_tied:
            dist.all_reduce(own)
            torch.testing.assert_close(own, after - before, rtol=1e-4, atol=1e-6)
        assert rank == 2 or not torch.equal(mine, before)
    trained.step(is_sync=False)
    trained.step()
    trained.engine.close()


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_gradients_dropped_after_no_sync(is_tied: bool) -> None:
    spawn(drop, 3, is_tied, timeout=60)


def change(rank: int, world_size: int) -> str:
    trained = Trained()
    trained.step()
    trained.step(is_sync=False)
    if rank == 1:
        grad = trained.model.second.bias.grad
        assert grad is not None
        grad.mul_(0.5)
    return trained.refused()


def test_gradients_changed_after_no_sync_are_refused() -> None:
    for text in spawn(change, 3, timeout=60):
        assert "the gradient of second.bias of stage 0 was changed after a step in no_sync" in text


def unfreeze_a_stage(rank: int, world_size: int) -> str:
    """It is refused before anything runs; frozen again, the engine goes on."""
    trained = Trained(frozen=("first.weight", "first.bias", "second.weight", "second.bias"))
    trained.step()
    trained.freeze("first.weight", frozen=False)
    with pytest.raises(ValueError) as caught:
        trained.engine.step(torch.randn(4, 4), target=torch.randn(4, 4))
    trained.freeze("first.weight")
    trained.step()
    trained.engine.close()
    return str(caught.value)


def test_a_stage_that_was_all_frozen() -> None:
    for text in spawn(unfreeze_a_stage, 3):
        assert "first.weight was unfrozen, but all of stage 0 was frozen when the engine was made" in text
