"""What a user who errs is told, and the small things around an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.pipelining as torchs
from pipeline_cases import compare, has_output
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.group import reshards_of
from torch_xmesh.testing import serial_step, spawn


class Model(nn.Module):
    """Returns a dict with a loss of its own, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        y = self.second(torch.tanh(self.first(x)) * mask * scale)
        return {"loss": y.square().mean(), "logits": y}


def loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output["logits"], target) + output["loss"]


def make(**options: Any) -> xm.PipelineEngine:
    given: dict[str, Any] = {"model": Model(), "num_microbatches": 2, "meshes": [xm.Mesh([0]), xm.Mesh([1, 2])]}
    given.update(options)
    model = given.pop("model")
    example = given.pop("example_args", (torch.empty(2, 4), torch.empty(2, 4)))
    return xm.PipelineEngine(model, example, split=xm.split_at("second"), loss_fn=loss, **given)


def values_of_any_length(rank: int, world_size: int) -> None:
    """What ranks tell each other has ever other lengths, for which not as many reshards are planned and kept."""
    with make() as engine:
        transfers = engine._transfers
        plans = reshards_of(None).plans.prepared
        transfers.gather("test", "")
        transfers.broadcast("test", 0, "")
        before = len(plans)
        for length in range(300, 400, 3):
            told = transfers.gather("test", "x" * (length + rank))
            assert [len(text) for text in told] == [length + other for other in range(world_size)]
            assert transfers.broadcast("test", 1, "y" * length if rank == 1 else None) == "y" * length
        assert len(plans) - before <= 5


def test_values_of_any_length() -> None:
    spawn(values_of_any_length, 3, timeout=60)


def engine_in_use(rank: int, world_size: int) -> None:
    reference = Model()
    x, mask, y = torch.randn(8, 4), torch.ones(8, 4), torch.randn(8, 4)
    with make(schedule=torchs.Schedule1F1B) as engine:
        assert engine.schedule.name == "1f1b"
        stages = f"stage {0 if rank == 0 else 1}"
        assert repr(engine) == (
            f"PipelineEngine(2 stages on 2 places, schedule '1f1b', 2 microbatches; rank {rank}: {stages})"
        )
        wrong: tuple[tuple[tuple[Any, ...], dict[str, Any], str], ...] = (
            ((x,), {}, "1 positional arguments: the example arguments were 2 positional"),
            ((x, mask, y), {}, "3 positional arguments: .* the target goes by its name: target=y"),
            ((x, mask), {"scael": 1.0}, "unknown argument 'scael'"),
            ((x, (mask, mask)), {}, r"argument args\[1\] is a tuple of 2, the example's was"),
        )
        for args, kwargs, text in wrong:
            with pytest.raises(ValueError, match=text if rank == 0 else f"rank 0 refused the step: {text}"):
                engine.step(*args, target=y, **kwargs)
        with pytest.raises(ValueError, match="losses is a list that gets one loss per microbatch, got tuple"):
            engine.step(x, mask, target=y, losses=())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"engine.scaler\(\) takes a torch.amp.GradScaler, got float"):
            engine.scaler(2.0)  # type: ignore[arg-type]
        losses: list[torch.Tensor] = []
        output = engine.step(x, mask, target=y, losses=losses)
        options: dict[str, Any] = {"loss_fn": loss, "num_microbatches": 2, "num_data_shards": 2}
        expected = serial_step(reference, (x, mask), target=y, **options)
        compare(engine, reference, expected, output, losses, "a step")
        if has_output(engine):
            assert output["loss"].shape == (4,)  # two microbatches on two data shards
        engine.zero_grad(set_to_none=False)
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in engine.parameters())
        engine.zero_grad()
        assert all(parameter.grad is None for parameter in engine.parameters())
    assert repr(engine).endswith(", closed)")
    with pytest.raises(RuntimeError, match="closed"):
        engine.evaluate(x, mask)


def test_an_engine_in_use() -> None:
    spawn(engine_in_use, 3, timeout=60)


def mistakes(rank: int, world_size: int) -> None:
    wrapped = nn.parallel.DistributedDataParallel(Model())
    number = 'num_microbatches is an int of at least 1 or "auto"'
    for options, text in (
        ({"schedule": "1F1B", "num_microbatches": "4"}, f"{number}, got '4' .str."),
        ({"num_microbatches": 2.0}, f"{number}, got 2.0 .float."),
        ({"num_microbatches": 0}, f"{number}, got 0"),
        ({"schedule": "eager1f2b"}, "unknown schedule 'eager1f2b': expected one of .*; did you mean 'eager_1f1b'"),
        ({"schedule": torchs.ScheduleDualPipeV}, "schedule ScheduleDualPipeV overlaps .*: 'zb_v' has the same places"),
        ({"schedule": 7}, "a schedule is a name, a CSV, an xm.Schedule or a class of torch.distributed.pipelining"),
        ({"example_args": torch.empty(2, 4)}, r"example_args is a tuple .* got Tensor: pass \(x,\)"),
        ({"example_args": ()}, "example_args is missing"),
        ({"example_kwargs": torch.empty(2, 4)}, "example_kwargs is a dict of keyword arguments or None, got Tensor"),
        ({"model": wrapped}, "wrapped in DistributedDataParallel: pass the plain module"),
    ):
        with pytest.raises(ValueError, match=text):
            make(**options)


def test_mistakes() -> None:
    spawn(mistakes, 3, timeout=60)


@pytest.mark.parametrize(
    ("torchs_name", "ours"),
    [
        ("1F1B", "1f1b"),
        ("GPipe", "gpipe"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("LoopedBFS", "looped_bfs"),
        ("InterleavedZeroBubble", "interleaved_zb"),
        (torchs.ScheduleZBVZeroBubble, "zb_v"),
        (torchs.ScheduleGPipe, "gpipe"),
        (torchs.ScheduleInterleaved1F1B, "interleaved_1f1b"),
        ("eager_1f1b", "eager_1f1b"),
    ],
)
def test_torchs_names(torchs_name: Any, ours: str) -> None:
    assert xm.Schedule.make(torchs_name, 2, 4).name == ours
