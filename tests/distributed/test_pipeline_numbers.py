"""Dtypes, autocast, frozen parameters, changing batches, wrapped stages, learning rates: each against one process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_cases import about, compare, has_output
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.microbatch import _Replicate as Replicate
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step, spawn

THREE = ([0], [1], [2])


def plain(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)]
    return nn.Sequential(*layers).to(dtype)


def make(model: nn.Module, meshes: Any = THREE, **options: Any) -> xm.PipelineEngine:
    dtype = next(model.parameters()).dtype
    settings: dict[str, Any] = {
        "split": xm.split_at(*("2", "4")[: len(meshes) - 1]),
        "num_microbatches": 4,
        "loss_fn": F.mse_loss,
        **options,
    }
    example = (torch.empty(2, 6, dtype=dtype),)
    return xm.PipelineEngine(model, example, meshes=[xm.Mesh(mesh) for mesh in meshes], **settings)


def batch(step: int, samples: int = 9, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100 + step)
    return torch.randn(samples, 6).to(dtype), torch.randn(samples, 3).to(dtype)


def train(engine: xm.PipelineEngine, reference: nn.Module, sizes: tuple[int, ...] = (9, 9, 9), **options: Any) -> None:
    """A step of SGD per size, each compared; `bitwise` where the order of operations is the same."""
    is_bitwise = options.pop("bitwise", False)
    make_optimizer: Callable[[Any], Any] = options.pop("optimizer", lambda p: torch.optim.SGD(p, 0.1))
    make_schedule: Callable[[Any], Any] | None = options.pop("schedule", None)
    mode = options.pop("mode", contextlib.nullcontext)
    dtype = next(reference.parameters()).dtype
    mine, theirs = make_optimizer(engine.parameters()), make_optimizer(reference.parameters())
    rates = [make_schedule(one) for one in (mine, theirs)] if make_schedule is not None else []
    settings: dict[str, Any] = {"loss_fn": F.mse_loss, "num_microbatches": 4, **options}
    for step, samples in enumerate(sizes):
        x, y = batch(step, samples, dtype)
        mine.zero_grad()
        theirs.zero_grad()
        losses: list[torch.Tensor] = []
        with mode():
            output = engine.step(x, target=y, losses=losses)
            expected = serial_step(reference, (x,), target=y, **settings)
        if is_bitwise:
            _equal(engine, reference, step)
            assert (output is not None) == has_output(engine)
            if output is not None:
                torch.testing.assert_close(output, expected.output, rtol=0, atol=0)
        else:
            compare(engine, reference, expected, output, losses, f"step {step}")
        mine.step()
        theirs.step()
        for rate in rates:
            rate.step()


def _equal(engine: xm.PipelineEngine, reference: nn.Module, step: int) -> None:
    expected = dict(reference.named_parameters())
    assert list(engine.parameters())
    for name, parameter in engine.named_parameters():
        found, wanted = parameter.grad, expected[name].grad
        assert (found is None) == (wanted is None), name
        if found is not None and wanted is not None:
            assert found.dtype == wanted.dtype
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=about(f"{name}, step {step}"))


def dtypes(rank: int, world_size: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        model = plain(dtype)
        reference = copy.deepcopy(model)
        engine = make(model)
        train(engine, reference, bitwise=True)
        engine.close()


def test_dtypes_are_bitwise_equal() -> None:
    spawn(dtypes, 3, timeout=60)


def autocast(rank: int, world_size: int) -> None:
    def lower() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    model = plain()
    reference = copy.deepcopy(model)
    with lower():
        engine = make(model)
    train(engine, reference, bitwise=True, mode=lower)
    engine.close()
    engine = make(model)
    for mode in (lower, contextlib.nullcontext, lower):  # it was made without
        train(engine, reference, bitwise=True, mode=mode)
    x, y = batch(0)
    with lower() if rank == 0 else contextlib.nullcontext(), pytest.raises(ValueError, match="rank.* torch.autocast"):
        engine.step(x, target=y)
    train(engine, reference, bitwise=True, mode=lower)
    engine.close()


def test_autocast_around_a_step() -> None:
    spawn(autocast, 3, timeout=60)


def frozen(rank: int, world_size: int) -> None:
    for layer in (0, 2, 4):
        model = plain()
        model[layer].requires_grad_(False)
        reference = copy.deepcopy(model)
        engine = make(model)
        train(
            engine, reference, bitwise=True, optimizer=lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(1))], 0.1)
        )
        engine.close()
    model = plain()
    model[0].requires_grad_(False)
    engine = make(model)
    model[0].requires_grad_(True)
    x, y = batch(0)
    with pytest.raises(ValueError, match=r"0\.weight was unfrozen, but all of stage 0 was frozen"):
        engine.step(x, target=y)
    model[0].requires_grad_(False)
    engine.step(x, target=y)  # a refused step has changed nothing
    engine.close()


def test_frozen_parameters() -> None:
    spawn(frozen, 3, timeout=60)


def changing(rank: int, world_size: int) -> None:
    """Every step has another number of samples, also fewer per microbatch than data shards; more microbatches than
    stages and the other way round."""
    model = plain()
    reference = copy.deepcopy(model)
    engine = make(model, ([0, 1], [2]))
    train(engine, reference, (9, 4, 13, 9, 4))
    counts = engine.buffer_counts
    train(engine, reference, (13, 4, 9))
    assert engine.buffer_counts == counts
    engine.close()
    for microbatches in (1, 2, 16):
        model = plain()
        reference = copy.deepcopy(model)
        engine = make(model, num_microbatches=microbatches)
        train(engine, reference, (19, 16), num_microbatches=microbatches)
        engine.close()


def test_batches_that_change() -> None:
    spawn(changing, 3, timeout=60)


def summed(rank: int, world_size: int) -> None:
    """A loss that is a sum over its samples."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target, reduction="sum")

    model = plain()
    reference = copy.deepcopy(model)
    engine = make(model, ([0, 1], [2]), loss_fn=loss, scale_grads=False)
    train(engine, reference, (9, 13), loss_fn=loss, scale_grads=False, optimizer=lambda p: torch.optim.SGD(p, 1e-3))
    engine.close()


def test_a_loss_that_is_a_sum() -> None:
    spawn(summed, 3, timeout=60)


class Tabled(nn.Module):
    """Later stages read a table that is whole in every microbatch, a mask that is cut along dim 1, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, *, table: torch.Tensor, mask: torch.Tensor, power: int) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.second(x * table)) * mask.transpose(0, 1)
        return self.third(x + table.square()) ** power  # type: ignore[no-any-return]


def tabled(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Tabled()
    reference = copy.deepcopy(model)
    spec = {"table": Replicate, "mask": TensorChunkSpec(1), "power": None}  # type: ignore[no-untyped-call]
    example = {"table": torch.empty(6), "mask": torch.empty(6, 2, dtype=torch.bool), "power": 2}
    engine = xm.PipelineEngine(
        model,
        (torch.empty(2, 6),),
        example,
        meshes=[xm.Mesh([0, 1]), xm.Mesh([2]), xm.Mesh([3])],
        split=xm.split_at("second", "third"),
        num_microbatches=4,
        loss_fn=F.mse_loss,
        kwargs_chunk_spec=spec,
    )
    for step in range(2):
        x, y = batch(step, 11)
        kwargs: dict[str, Any] = {"table": torch.randn(6), "mask": torch.rand(6, 11) > 0.3, "power": 2}
        losses: list[torch.Tensor] = []
        output = engine.step(x, target=y, losses=losses, **kwargs)
        expected = serial_step(
            reference, (x,), kwargs, target=y, loss_fn=F.mse_loss, num_microbatches=4, kwargs_chunk_spec=spec
        )
        compare(engine, reference, expected, output, losses, f"step {step}")
    engine.close()


def test_arguments_of_later_stages() -> None:
    spawn(tabled, 4, timeout=60)


class Memory(nn.Module):
    """Values that cross stages in odd memory: expanded, transposed, sliced, two views of one tensor, complex, a
    parameter's."""

    KINDS = ("expanded", "transposed", "sliced", "views", "complex", "parameter")

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.weight = nn.Parameter(torch.randn(6))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        wide = x.unsqueeze(1).expand(-1, 4, -1)
        makers: dict[str, Callable[[], torch.Tensor]] = {
            "expanded": lambda: wide,
            "transposed": lambda: wide.transpose(1, 2),
            "sliced": lambda: x[:, ::2],
            "views": lambda: x.view(-1, 2, 3),
            "complex": lambda: torch.fft.fft(x),
            "parameter": lambda: self.weight * 2,
        }
        odd = makers[self.kind]()
        y = self.third(torch.tanh(self.second(x)))
        readers: dict[str, Callable[[], torch.Tensor]] = {
            "expanded": lambda: odd.sum(1)[:, :3],
            "transposed": lambda: odd.mean(2)[:, :3],
            "sliced": lambda: odd,
            "views": lambda: odd.sum(1) + x[:, :3],
            "complex": lambda: torch.fft.ifft(odd).real[:, :3],
            "parameter": lambda: odd[:3],
        }
        return y + readers[self.kind]()  # type: ignore[no-any-return]


def memory(rank: int, world_size: int) -> None:
    for kind in Memory.KINDS:
        for meshes in (([0], [1], [2]), ([0, 1], [2], [3])):
            if rank in {r for mesh in meshes for r in mesh}:
                torch.manual_seed(0)
                model = Memory(kind)
                reference = copy.deepcopy(model)
                engine = make(model, meshes, split=xm.split_at("second", "third"))
                train(engine, reference, (8, 8))
                engine.close()


def test_values_in_odd_memory() -> None:
    spawn(memory, 4, timeout=90)


def inference(rank: int, world_size: int) -> None:
    model = plain()
    reference = copy.deepcopy(model)
    engine = make(model)
    x, y = batch(0)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            output = engine.evaluate(x, target=y)
        assert (output is not None) == has_output(engine)
        if output is not None:
            torch.testing.assert_close(output, reference(x).detach())
    train(engine, reference, bitwise=True)
    engine.close()


def test_evaluation_in_inference_mode_leaves_nothing_behind() -> None:
    spawn(inference, 3, timeout=60)


def wrapped(rank: int, world_size: int) -> None:
    """Wrappers put words into names; the engine's are the model's."""

    def checkpointed(stage: int, module: nn.Module, mesh: Any) -> nn.Module:
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, checkpoint_wrapper(child))
        return module

    def compiled(stage: int, module: nn.Module, mesh: Any) -> nn.Module:
        return torch.compile(module, backend="eager")  # type: ignore[return-value]

    for parallelize in (checkpointed, compiled):
        model = plain()
        reference = copy.deepcopy(model)
        names = set(reference.state_dict())
        engine = make(model, parallelize=parallelize)
        assert {name for name, _ in engine.named_parameters()} == set(engine.state_dict()) <= names
        assert list(engine.parameters())
        train(engine, reference, bitwise=True)
        torch.manual_seed(3)
        other = nn.Sequential(*(copy.deepcopy(layer) for layer in reference))
        for parameter in other.parameters():
            nn.init.normal_(parameter)
        engine.load_state_dict(other.state_dict())
        train(engine, other, bitwise=True)
        engine.close()


def test_wrapped_stages_keep_the_models_names() -> None:
    spawn(wrapped, 3, timeout=90)


def rates(rank: int, world_size: int) -> None:
    model = plain()
    reference = copy.deepcopy(model)
    engine = make(model, schedule="1f1b")
    train(
        engine,
        reference,
        (9,) * 4,
        bitwise=True,
        optimizer=lambda p: torch.optim.AdamW(p, 0.05),
        schedule=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
    )
    engine.close()


def test_learning_rate_schedules() -> None:
    spawn(rates, 3, timeout=60)
