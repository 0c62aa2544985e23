"""Whatever a person passes, an error is one of the package's own words: a ValueError (or an OSError that names the
path), raised in its sources. Over every parameter of every public function."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from wrong_values import WRONG

import torch_xmesh as xm
from torch_xmesh.testing import spawn

PACKAGE = Path(xm.__file__).parent
MODEL = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
DEVICES = xm.Mesh([[0, 1]])
COMPUTE = xm.Compute(1e12, 1e11)
PLANNED: dict[str, Any] = {
    "model": MODEL,
    "example_args": (torch.zeros(4, 8),),
    "devices": DEVICES,
    "num_microbatches": 2,
    "compute": COMPUTE,
}
COSTS = xm.Costs(stages=[xm.StageCosts(forward_seconds=1e-3)] * 2, edges={(0, 1): 1e-3})


@pytest.fixture(scope="module")
def plan() -> xm.ParallelPlan:
    return xm.plan_parallel(**PLANNED)


def calls(plan: xm.ParallelPlan, folder: Path) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Each with arguments that are right."""
    plan.save(folder / "plan.json")
    xm.Topology(devices_per_host=1).save(folder / "topology.json")
    spec = xm.Spec((8,), torch.float32, xm.Mesh([0]), [Shard(0)])
    resharding: dict[str, Any] = {"specs": spec, "dst_mesh": xm.Mesh([1]), "dst_placements": [Replicate()]}
    resharding["topology"] = xm.Topology(devices_per_host=1)
    yield "plan_parallel", xm.plan_parallel, PLANNED
    needed = {"megatron": {"tensor_parallel": 2}, "pipeline": {"num_stages": 2}}
    for preset in ("data_parallel", "zero_2", "zero_3", "megatron", "pipeline"):
        yield preset, getattr(xm.presets, preset), PLANNED | needed.get(preset, {})
    yield "plan_resharding", xm.plan_resharding, resharding
    yield "choose_schedule", xm.choose_schedule, {"costs": COSTS, "num_stages": 2, "num_microbatches": 2}
    yield "simulate", xm.simulate, {"schedule": xm.Schedule.make("1F1B", 2, 2), "costs": COSTS}
    yield "Schedule.make", xm.Schedule.make, {"name": "1F1B", "num_stages": 2, "num_microbatches": 2}
    yield "Schedule.from_csv", xm.Schedule.from_csv, {"source": xm.Schedule.make("GPipe", 2, 2).to_csv()}
    yield "ParallelPlan.load", xm.ParallelPlan.load, {"path": folder / "plan.json"}
    yield "ParallelPlan.from_json", xm.ParallelPlan.from_json, {"text": plan.to_json()}
    yield "plan.explain", plan.explain, {"name": "0"}
    yield "plan.stage_of", plan.stage_of, {"name": "0"}
    yield "plan.predicted_bytes", plan.predicted_bytes, {"device": 0}
    yield "Topology", xm.Topology, {"devices_per_host": 1}
    yield "Topology.load", xm.Topology.load, {"path": folder / "topology.json"}
    yield "Topology.from_json", xm.Topology.from_json, {"text": xm.Topology(devices_per_host=1).to_json()}
    yield "ReshardingPlan.from_json", xm.ReshardingPlan.from_json, {"text": xm.plan_resharding(**resharding).to_json()}
    yield "Mesh", xm.Mesh, {"ranks": [0, 1]}
    yield (
        "Spec",
        xm.Spec,
        {"shape": (8,), "dtype": torch.float32, "mesh": xm.Mesh([0]), "placements": [Shard(0)]},
    )
    yield "Compute", xm.Compute, {"flops": 1e12, "bytes_per_s": 1e11}
    yield "Broadcast", xm.Broadcast, {}
    yield "StageCosts", xm.StageCosts, {"forward_seconds": 1e-3}
    yield "EdgeCosts", xm.EdgeCosts, {}


OTHERS_WORDS: list[tuple[str, str, Any]] = [("PipelineEngine", "parallelize", int)]
"""A function that was given, which raises when it is called."""


def is_own(error: BaseException) -> bool:
    """Raised by the package's own line, as a kind of error that its pages name."""
    if isinstance(error, OSError):
        return error.filename is not None or "could not write" in str(error)
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, xm.StageError):  # of what the model or the loss made of it
        return True
    return isinstance(error, ValueError | NotImplementedError) and Path(frames[-1].filename).is_relative_to(PACKAGE)


def foreign_errors(name: str, call: Callable[..., Any], right: dict[str, Any]) -> Iterator[str]:
    """Errors of a call with one argument that is wrong, after one with none that are."""
    call(**right)
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    kinds = inspect.signature(call).parameters
    named = {parameter for parameter, kind in kinds.items() if kind.kind not in variable} - {"self"}
    for parameter in sorted(named | set(right)):
        for wrong in WRONG:
            try:
                call(**{**right, parameter: copy.copy(wrong)})
            except BaseException as error:
                if not is_own(error) and (name, parameter, wrong) not in OTHERS_WORDS:
                    said = str(error).splitlines() or [""]
                    yield f"{name}({parameter}={wrong!r}): {type(error).__name__}: {said[0][:120]}"


def test_wrong_arguments(plan: xm.ParallelPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    foreign = [text for call in calls(plan, tmp_path) for text in foreign_errors(*call)]
    assert not foreign, "\n" + "\n".join(foreign)


ENGINE: dict[str, Any] = {
    "model": MODEL,
    "example_args": (torch.zeros(4, 8),),
    "meshes": [xm.Mesh([0])],
    "num_microbatches": 2,
    "loss_fn": nn.functional.mse_loss,
}


def make_engine(**given: Any) -> None:
    xm.PipelineEngine(**given).close()


make_engine.__signature__ = inspect.signature(xm.PipelineEngine)  # type: ignore[attr-defined]


def group_calls(folder: Path) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Each with arguments that are right, on the one rank of a group."""
    mesh = xm.Mesh([0])
    x = DTensor.from_local(torch.zeros(8), xm.device_mesh(mesh), [Shard(0)], run_check=False)
    moved: dict[str, Any] = {"dst_mesh": mesh, "dst_placements": [Replicate()]}
    yield "reshard", xm.reshard, {"x": x, **moved}
    yield "reshard_many", xm.reshard_many, {"xs": {"a": x, "b": x}, **moved}
    yield "PipelineEngine", make_engine, ENGINE
    engine = xm.PipelineEngine(**ENGINE)
    optimizer = torch.optim.Adam(engine.parameters(), 0.1)
    state = engine.state_dict(optimizer)
    engine.close()
    batch: dict[str, Any] = {"x": torch.zeros(8, 8), "target": torch.zeros(8, 8)}
    rights: dict[str, dict[str, Any]] = {
        "step": batch,
        "evaluate": batch,
        "clip_grad_norm_": {"max_norm": 1.0},
        "state_dict": {"optimizer": optimizer},
        "load_state_dict": {"state": state, "optimizer": optimizer},
        "scaler": {"scaler": torch.amp.GradScaler("cpu", enabled=False)},
        "stage_module": {"stage": 0},
        "costs": {"stages": [xm.StageCosts(forward_seconds=1e-3)]},
        "trace": {"path": folder / "trace.json"},
        "timeline": {"path": folder / "timeline.png"},
    }
    for name, right in rights.items():
        yield f"engine.{name}", of_engine(name), right


def of_engine(name: str) -> Callable[..., Any]:
    """A method of an engine, which can step before and after."""
    kept: list[xm.PipelineEngine] = []

    def call(*, x: Any = None, **given: Any) -> None:
        if not kept:
            kept.append(xm.PipelineEngine(**ENGINE))
            step()
        try:
            getattr(kept[0], name)(*(() if x is None else (x,)), **given)
        finally:
            kept[0].scaler(torch.amp.GradScaler("cpu", enabled=False))
            step()

    def step() -> None:
        try:
            kept[0].step(torch.zeros(8, 8), target=torch.zeros(8, 8))
        except xm.StageError:
            kept.pop().close()
            raise

    call.__signature__ = inspect.signature(getattr(xm.PipelineEngine, name))  # type: ignore[attr-defined]
    return call


def of_a_group(rank: int, world_size: int, folder: str) -> list[str]:
    os.chdir(folder)
    return [text for call in group_calls(Path(folder)) for text in foreign_errors(*call)]


def test_wrong_arguments_of_a_group(tmp_path: Path) -> None:
    (foreign,) = spawn(of_a_group, 1, str(tmp_path), timeout=150)
    assert not foreign, "\n" + "\n".join(foreign)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(bytes(range(256)))
    readers: list[Callable[[Path], Any]] = [
        xm.ParallelPlan.load,
        xm.Topology.load,
        xm.OperatorTimes.load,
        xm.Schedule.from_csv,
    ]
    for read in readers:
        with pytest.raises(ValueError, match=r"binary.* is no text"):
            read(path)


def test_a_plan_is_plain_data(plan: xm.ParallelPlan) -> None:
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert copy.deepcopy(plan) == plan
    assert copy.deepcopy(plan).explain("0") == plan.explain("0")


def test_a_model_of_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="weight was made in torch.inference_mode"):
        xm.plan_parallel(**{**PLANNED, "model": model})
