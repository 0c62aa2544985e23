"""Pipelines whose stages are on a device, on the emulated one: to the last bit what they give on cpu."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import device_features
import pytest
import test_pipeline
import test_pipeline_library_models as library
import torch
from device_pipelines import compare_steps, place, train_both, train_random
from device_ranks import on_device as on_ranks
from pipeline_cases import Run

import torch_xmesh as xm
from torch_xmesh.pipeline.cut.partition import partition

pytestmark = pytest.mark.timeout(900)  # the first test builds the device


def on_device(body: Callable[..., Any], world_size: int, *args: Any) -> None:
    """Many engines one after another, on machines of any speed."""
    on_ranks(body, world_size, *args, timeout=800)


def train_all(rank: int, world_size: int, runs: list[tuple[Run, tuple[str, ...] | None]]) -> int:
    import emu_device

    emu_device.delays(0.3, 300, rank)
    torch.backends.cuda.enable_flash_sdp(False)  # the CPU's, too: the device has none
    mine = [(run, kinds) for run, kinds in runs if rank in run.ranks]
    for run, kinds in mine:
        train_both(run, kinds)
    return len(mine)


_UNKNOWN = ("lstm", "autocast", "hooks")  # `place` makes other parameters, without a user's hooks


def _known(runs: list[Run]) -> list[Run]:
    """The emulated device has no fused recurrent cells, and the CPU's autocast is not for it."""
    return [run for run in runs if run.model not in _UNKNOWN]


def all_on_device(runs: list[Run]) -> list[tuple[Run, tuple[str, ...] | None]]:
    return [(dataclasses.replace(run, steps=2), None) for run in _known(runs)]


_TIED = ("gpt", "gpt_dropout", "gpt_checkpoint", "tied")


def on_both(runs: list[Run]) -> list[tuple[Run, tuple[str, ...] | None]]:
    """Every other stage on cpu: each run with the first stage here, or there."""
    found: list[tuple[Run, tuple[str, ...] | None]] = []
    for number, run in enumerate(runs):
        kinds = tuple(("emu", "cpu")[(stage + number) % 2] for stage in range(len(run.meshes)))
        found.append((dataclasses.replace(run, steps=2), kinds))
    return found


def test_schedules() -> None:
    on_device(train_all, 4, all_on_device(test_pipeline.SCHEDULES[1::3]))


def test_models() -> None:
    on_device(train_all, 4, all_on_device(test_pipeline.MODELS))


def test_split_backwards() -> None:
    on_device(train_all, 4, all_on_device(test_pipeline.SPLIT_BACKWARDS))


def test_meshes() -> None:
    on_device(train_all, 4, all_on_device(test_pipeline.MIXED + test_pipeline.WIDE))


def test_several_stages_per_rank() -> None:
    on_device(train_all, 4, all_on_device(test_pipeline.SHARED + test_pipeline.OFF))


def test_stages_on_both() -> None:
    runs = [run for run in _known(test_pipeline.MODELS) if run.split]
    runs += test_pipeline.SHARED[:6] + test_pipeline.MIXED[:5]
    on_device(train_all, 4, on_both([run for run in runs if run.model not in _TIED]))


def usual(rank: int, world_size: int, case: Callable[[int, int], None]) -> None:
    """With torch's own default device, as most programs have it."""
    torch.set_default_device("cpu")
    case(rank, world_size)


def train_many(rank: int, world_size: int, first: int, count: int) -> None:
    import emu_device

    emu_device.delays(0.3, 300, rank)
    for seed in range(first, first + count):
        train_random(seed, rank, world_size)


@pytest.mark.in_turn(8)
@pytest.mark.parametrize("part", range(8))
def test_random_pipelines(part: int) -> None:
    """200 of them with --soak."""
    on_device(train_many, 4, 25 * part, 25)


def families(rank: int, world_size: int, names: Sequence[str]) -> None:
    """Models as their libraries make them, in two stages."""
    torch.set_default_device("cpu")
    torch.backends.cuda.enable_flash_sdp(False)
    for name in names:

        def made(kind: str, name: str = name) -> xm.PipelineEngine:
            torch.manual_seed(0)
            model = library.build(name)
            given, split = library.batch_of(name), library.SPLITS[name][0]
            cut = partition(model, (), given, xm.split_at(*split))
            engine: xm.PipelineEngine = library.make(place(model, cut, [kind] * 2), given, library.TWO, split)
            return engine

        def step(engine: xm.PipelineEngine, number: int, name: str = name) -> Any:
            losses: list[torch.Tensor] = []
            engine.step(**library.batches_of(name)[number], losses=losses)
            return losses

        compare_steps(made("cpu"), made("emu"), step, 3, name)


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="runs on any machine with the extra `models`"
)
def test_library_models(part: int) -> None:
    names = [name for name in library.FAMILIES if name not in ("Mixtral", "Qwen2-MoE")]  # histc of int32: not on a CPU
    on_device(families, 3, names[part::4])


@pytest.mark.parametrize("case", device_features.CASES)
def test_features(case: Callable[[int, int], None]) -> None:
    on_device(usual, 4, case)


def example(rank: int, world_size: int, folder: str) -> None:
    """``examples/train_gpt.py --device emu``: its own check is against one process on the device."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    import train_gpt

    torch.set_default_device("cpu")
    options = {"steps": 3, "check_steps": 2, "batch": 8, "microbatches": 4, "width": 16, "depth": 2, "device": "emu"}
    pictures = {"losses": f"{folder}/losses.png", "timeline": f"{folder}/timeline.png"}
    train_gpt.train(argparse.Namespace(**options, **pictures))


def test_example(tmp_path: Path) -> None:
    on_device(example, 3, str(tmp_path))
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
