"""The oracle of pipelines against one backward over the whole batch."""

import copy
from typing import Any

import pytest
import torch
from models import cases, small, vision
from partition_cases import assert_same, cut, gradients
from torch.nn import functional as F

from torch_xmesh.pipeline.cut.partition import partition, split_at
from torch_xmesh.testing.serial import serial_step

MODES = [
    pytest.param(shards, first, id=f"{shards}-{'shards' if first else 'microbatches'}-first")
    for shards in (1, 2)
    for first in (False, True)
]


@pytest.mark.parametrize(("shards", "first"), MODES)
@pytest.mark.parametrize("name", ["mlp", "gpt", "bert", "unet", "lstm", "tied"])
def test_the_serial_step_is_the_mean_over_the_batch(name: str, shards: int, first: bool) -> None:
    case = next(case for case in cases() if case.name == name)
    torch.manual_seed(0)
    model = case.build()
    expected = copy.deepcopy(model)
    args, kwargs, target = case.batch(7)
    loss = case.loss(expected(*args, **kwargs), target)
    loss.backward()  # type: ignore[no-untyped-call]
    specs = dict(case.specs)
    result = serial_step(
        model,
        args,
        kwargs,
        target=target,
        loss_fn=case.loss,
        num_microbatches=3,
        num_data_shards=shards,
        shard_first=first,
        partition=cut(case, model, case.splits[0]),
        return_outputs=not (first and shards > 1),
        **specs,
    )
    torch.testing.assert_close(result.loss, loss.detach())
    assert gradients(model).keys() == gradients(expected).keys()
    for name_, gradient in gradients(expected).items():
        torch.testing.assert_close(gradients(model)[name_], gradient)
    assert len(result.losses) == 3
    assert (result.output is None) == (first and shards > 1)
    if result.output is not None:
        torch.testing.assert_close(result.output, expected(*args, **kwargs))


def test_what_the_serial_step_refuses() -> None:
    case = next(case for case in cases() if case.name == "mlp")
    model, other = case.build(), case.build()
    args, _, target = case.batch(6)
    own = cut(case, model, case.splits[0])
    options: dict[str, Any] = {"target": target, "loss_fn": case.loss, "num_microbatches": 2}
    with pytest.raises(ValueError, match=r"partition is of another model: parameter .* of its stage 0"):
        serial_step(other, args, partition=own, **options)
    assert all(parameter.grad is None for parameter in (*model.parameters(), *other.parameters()))
    serial_step(model, args, partition=own, num_data_shards=[1] * (own.num_stages - 1) + [2], **options)
    with pytest.raises(ValueError, match=f"num_data_shards has 1 numbers for {own.num_stages} stages"):
        serial_step(model, args, partition=own, num_data_shards=[2], **options)
    dropped = small.MLP(dropout=0.5)
    x, y = torch.randn(6, 6), torch.randn(6, 3)
    mine = partition(dropped, (x[:3],), None, split_at("layers.2"))
    options |= {"target": y, "loss_fn": F.mse_loss}
    with pytest.raises(ValueError, match=r"stages with dropout have \[2, 1\] data shards"):
        serial_step(dropped, (x,), partition=mine, num_data_shards=[2, 1], **options)
    serial_step(dropped.eval(), (x,), partition=mine, num_data_shards=[2, 1], **options)


def test_the_serial_step_seeds_dropout_and_accumulates() -> None:
    torch.manual_seed(0)
    model = small.MLP(dropout=0.5)
    x, y = torch.randn(6, 6), torch.randn(6, 3)
    state = torch.random.get_rng_state()
    first = serial_step(model, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=2, seed=5, step=1)
    once = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    second = serial_step(model, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=2, seed=5, step=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert_same(first.losses, second.losses)
    torch.testing.assert_close(
        [parameter.grad for parameter in model.parameters()], [2 * gradient for gradient in once]
    )
    other = serial_step(model, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=2, seed=5, step=2, backward=False)
    assert not torch.equal(other.loss, first.loss)


def test_buffers_end_as_data_shard_0_leaves_them() -> None:
    torch.manual_seed(0)
    model = vision.ConvNet()
    alone = copy.deepcopy(model)
    x, y = torch.randn(8, 2, 8, 8), torch.randn(8, 4)
    serial_step(model, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=2, num_data_shards=2)
    for half in (x[:2], x[4:6]):
        alone(half)
    assert_same(dict(model.named_buffers()), dict(alone.named_buffers()))
