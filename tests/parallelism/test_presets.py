"""Plans as people write them, and the command that sets them beside the one that is found."""

from __future__ import annotations

import contextlib
import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_cases import whole_of
from small_models import Gpt, Mlp
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.parallelism.by_hand import batch_loops, even_stages
from torch_xmesh.parallelism.layers import layers_of
from torch_xmesh.parallelism.recorded_forwards import forward_of
from torch_xmesh.testing import spawn
from xmesh_cli.main import main

TOKENS = torch.zeros(8, 16, dtype=torch.int64)
OPTIONS: dict[str, Any] = {
    "devices": xm.Mesh(torch.arange(8).reshape(2, 4)),
    "num_microbatches": 4,
    "compute": xm.Compute(flops=1e11, bytes_per_s=1e10),
    "topology": xm.Topology(devices_per_host=4, nic_bytes_per_s=10**8, local_bytes_per_s=10**10),
}
MODEL = Gpt(num_layers=4)


def collectives(plan: xm.ParallelPlan) -> set[str]:
    return {f"{one.why} {one.collective}" for stage in plan.stages for one in stage.collectives}


def test_data_parallel_only_adds_gradients() -> None:
    plan = xm.presets.data_parallel(MODEL, (TOKENS,), **OPTIONS)
    assert [stage.mesh_shape for stage in plan.stages] == [(8,)]
    assert collectives(plan) == {"gradient all-reduce"}
    size = sum(one.numel() * one.element_size() for one in MODEL.parameters())
    assert sum(one.num_bytes for one in plan.stages[0].collectives) == size
    assert plan.stages[0].bytes.parameters >= size


def test_zero_holds_less_and_fetches_more() -> None:
    plain, second, third = (
        preset(MODEL, (TOKENS,), **OPTIONS)
        for preset in (xm.presets.data_parallel, xm.presets.zero_2, xm.presets.zero_3)
    )
    assert plain.stages[0].bytes.total(1) > second.stages[0].bytes.total(1) > third.stages[0].bytes.total(1)
    assert collectives(second) >= {"backward reduce-scatter", "parameter all-gather"}
    assert collectives(third) >= {"backward reduce-scatter", "forward all-gather", "backward all-gather"}
    assert second.title == "ZeRO-2"


def test_megatron_shards_matrices() -> None:
    plan = xm.presets.megatron(MODEL, (TOKENS,), tensor_parallel=4, **OPTIONS)
    assert plan.stages[0].mesh_shape == (2, 4)
    heavy = [one for one in plan.stages[0].operators if one.is_heavy]
    assert all(one.axes[0] != one.axes[1] for one in heavy)
    up = next(one for one in heavy if one.name == "layers.1.up.linear")
    assert up.axes[0] == "b1"


def test_megatron_over_all_devices_shards_no_samples() -> None:
    options = {**OPTIONS, "devices": xm.Mesh([0, 1])}
    plan = xm.presets.megatron(MODEL, (TOKENS,), tensor_parallel=2, **options)
    heavy = [operator for operator in plan.stages[0].operators if operator.is_heavy]
    samples = batch_loops(forward_of(MODEL, (TOKENS,)))
    assert heavy
    assert not [operator.name for operator in heavy if samples[operator.name] in operator.axes]


def test_pipelines() -> None:
    plan = xm.presets.pipeline(MODEL, (TOKENS,), num_stages=2, tensor_parallel=2, zero=2, **OPTIONS)
    assert [stage.mesh_shape for stage in plan.stages] == [(2, 2), (2, 2)]
    assert [stage.ranks for stage in plan.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert plan.values
    assert "layers.0.query.linear" in plan.explain("layers.0.query")
    deep = xm.presets.pipeline(MODEL, (TOKENS,), num_stages=8, **OPTIONS)
    assert [len(stage.ranks) for stage in deep.stages] == [1] * 8


def test_no_preset_beats_what_is_found() -> None:
    """Under the same costs."""
    found = xm.plan_parallel(MODEL, (TOKENS,), **OPTIONS)
    made = [
        xm.presets.data_parallel(MODEL, (TOKENS,), **OPTIONS),
        xm.presets.zero_2(MODEL, (TOKENS,), **OPTIONS),
        xm.presets.megatron(MODEL, (TOKENS,), tensor_parallel=4, **OPTIONS),
        xm.presets.pipeline(MODEL, (TOKENS,), num_stages=2, **OPTIONS),
        xm.presets.pipeline(MODEL, (TOKENS,), num_stages=8, **OPTIONS),
    ]
    assert found.predicted_seconds <= 1.02 * min(plan.predicted_seconds for plan in made)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="8 devices in 3 stages of 1 x n devices each"):
        xm.presets.pipeline(MODEL, (TOKENS,), num_stages=3, **OPTIONS)
    with pytest.raises(ValueError, match="8 devices in 1 stages of 3 x n devices each"):
        xm.presets.megatron(MODEL, (TOKENS,), tensor_parallel=3, **OPTIONS)
    with pytest.raises(ValueError, match=r"does not keep memory_limit_bytes: a device would hold \d+ bytes"):
        xm.presets.data_parallel(MODEL, (TOKENS,), memory_limit_bytes=1000, **OPTIONS)
    with pytest.raises(ValueError, match=r"no sharding of .* is left"):
        xm.presets.data_parallel(MODEL, (TOKENS[:6],), **OPTIONS)


class Odd(nn.Module):
    """A layer between nine and seven features among others that divide."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 9), nn.Linear(9, 7), nn.Linear(7, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def odd(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Odd().double()
    whole, x = copy.deepcopy(model), torch.randn(6, 64, dtype=torch.float64)
    devices = xm.Mesh(range(4))
    plan = xm.presets.megatron(model, (x[:3],), tensor_parallel=4, devices=devices, num_microbatches=2)
    (note,) = (one for one in plan.notes if "several devices do alike" in one)
    assert "layers.2.linear" in note
    assert "layers.0.linear" not in note
    engine = xm.PipelineEngine(model, (x[:3],), plan=plan, loss_fn=F.mse_loss)
    engine.step(x, target=x)
    F.mse_loss(whole(x), x).backward()  # type: ignore[no-untyped-call]
    for name, parameter in engine.named_parameters():
        torch.testing.assert_close(whole_of(parameter.grad), whole.get_parameter(name).grad)
    engine.close()


def test_what_does_not_divide_is_left_whole() -> None:
    spawn(odd, 4)


def nothing(rank: int, world_size: int) -> None:
    """The second stage has no parameters; its optimizer can be made and stepped all the same."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Softmax(-1)), torch.randn(4, 6)
    engine = xm.PipelineEngine(
        model,
        (x[:2],),
        meshes=[xm.Mesh([0]), xm.Mesh([1])],
        split=xm.split_at("1"),
        num_microbatches=2,
        loss_fn=F.mse_loss,
    )
    optimizer = torch.optim.Adam(engine.parameters())
    for _ in range(2):
        engine.step(x, target=x)
        optimizer.step()
        optimizer.zero_grad()
    state = engine.state_dict(optimizer)
    engine.load_state_dict(state, optimizer)
    assert sum(parameter.numel() for parameter in engine.parameters()) == (42 if rank == 0 else 0)
    engine.close()


def test_a_stage_without_parameters_has_an_optimizer() -> None:
    spawn(nothing, 2)


def test_the_loop_over_samples_is_followed() -> None:
    forward = forward_of(MODEL, (TOKENS,))
    loops = batch_loops(forward)
    for operator in forward.operators:
        if operator.loops.is_heavy:
            (dim,) = (i for i, label in enumerate(operator.loops.outputs[0]) if label == loops[operator.name])
            assert operator.makes[0].shape[dim] in (8, 128)
    assert all(loops[one.name] is not None for one in forward.operators if one.kind == "transpose")


def test_even_stages() -> None:
    layers = layers_of(forward_of(Mlp(32, 9), (torch.zeros(8, 32),)))
    for count in range(1, len(layers) + 1):
        stages = even_stages(layers, count)
        assert len(stages) == count
        assert stages[0][0] == 0
        assert stages[-1][1] == len(layers)
        assert all(first < end for first, end in stages)


MODEL_FILE = """
import torch
from torch import nn
from torch.nn import functional as F

def make():
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), torch.zeros(32, 64)
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL_FILE)
    saved = tmp_path / "plan.json"
    command = ["parallelize", f"{path}:make", "--mesh", "2x2", "--flops", "1e11", "--bytes-per-s", "1e10"]
    assert main([*command, "--compare", "--explain", "3", "--save", str(saved), "--plot", str(tmp_path / "p.png")]) == 0
    out = capsys.readouterr().out
    rows = [line.split()[0] for line in out.splitlines()[:8]]
    assert rows[:3] == ["plan", "found", "data"]
    assert "3.linear [32, 64] on stage" in out
    assert xm.ParallelPlan.load(saved).devices == 4
    assert (tmp_path / "p.png").exists()
    assert main([*command, "--costs"]) == 0
    tables = capsys.readouterr().out
    assert "collectives as ring's" in tables
    assert "2 x 2         1 all-reduce" in tables
    assert "    7 linear                   32 x 64" in tables
    assert main([*command, "--json"]) == 0
    assert xm.ParallelPlan.from_json(capsys.readouterr().out) == xm.ParallelPlan.load(saved)


def test_the_command_measures_operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once: the second time they are read."""
    path, times = tmp_path / "model.py", tmp_path / "times.json"
    path.write_text(MODEL_FILE)
    command = ["parallelize", f"{path}:make", "--mesh", "2x2", "--times", str(times), "--json"]
    assert main(command) == 0
    first, written = capsys.readouterr().out, times.read_text()
    assert '"linear(float32[32, 64]' in written
    assert main(command) == 0
    assert capsys.readouterr().out == first
    assert times.read_text() == written
    assert main([*command[:-1], "--costs"]) == 0
    assert ", others at" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nofile.py:make", "--mesh", "2x2"], "there is no Python file 'nofile.py'"),
        (["model.py", "--mesh", "2x2"], "model is file:function, got 'model.py'"),
        (["{path}:build", "--mesh", "2x2"], "has no function 'build'"),
        (["{path}:make", "--mesh", "two"], "--mesh is hosts x devices of each, as 2x4, got 'two'"),
        (["{path}:make", "--mesh", "2x2", "--flops", "1"], "give --flops and --bytes-per-s, or neither"),
        (["{path}:make", "--mesh", "1x2", "--times", "{path}.json", "--run"], "model.py.json: without --run it is"),
        (
            ["{path}:make", "--mesh", "1x2", "--times", "{path}", "--flops", "1", "--bytes-per-s", "1"],
            "give --times, or --flops and --bytes-per-s",
        ),
        (["{path}:make", "--mesh", "1x2", "--times", "{path}"], "model.py has no times of operators"),
    ],
)
def test_mistakes_in_the_command(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL_FILE)
    assert main(["parallelize", *(one.format(path=path) for one in arguments)]) == 2
    assert message in capsys.readouterr().err


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 100))


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("flops", [1e11, 1e13])
@pytest.mark.parametrize(("num_hosts", "num_devices"), [(2, 2), (2, 3), (1, 4)])
@pytest.mark.parametrize("name", ["convolutions", "gpt", "mlp"])
def test_found_plans_are_as_good_as_presets(name: str, num_hosts: int, num_devices: int, flops: float) -> None:
    """Or nearly: stages are cut by tables, and only the best of them are played."""
    model, x = {
        "convolutions": (convolutions(), torch.zeros(12, 3, 16, 16)),
        "gpt": (Gpt(num_layers=4), torch.zeros(12, 16, dtype=torch.int64)),
        "mlp": (Mlp(256, 6), torch.zeros(24, 256)),
    }[name]
    options: dict[str, Any] = {
        "devices": xm.Mesh(torch.arange(num_hosts * num_devices).reshape(num_hosts, num_devices)),
        "num_microbatches": 8,
        "compute": xm.Compute(flops=flops, bytes_per_s=flops / 10),
        "topology": xm.Topology(devices_per_host=num_devices, nic_bytes_per_s=10**9, local_bytes_per_s=5 * 10**10),
    }
    found = xm.plan_parallel(model, (x,), **options).predicted_seconds
    count = num_hosts * num_devices
    makers = [xm.presets.data_parallel, xm.presets.zero_2]
    makers += [functools.partial(xm.presets.megatron, tensor_parallel=size) for size in (2, 3) if count % size == 0]
    makers += [functools.partial(xm.presets.pipeline, num_stages=size) for size in (2, 3, 4) if count % size == 0]
    compared = 0
    for maker in makers:
        with contextlib.suppress(ValueError):  # the batch or a matrix does not divide
            assert found <= 1.01 * maker(model, (x,), **options).predicted_seconds
            compared += 1
    assert compared > 2


def test_a_tied_weight_of_two_stages_takes_its_time() -> None:
    tied = Gpt(num_layers=4)
    tied.head.weight = tied.tokens.weight
    plans = [xm.presets.pipeline(model, (TOKENS,), num_stages=2, **OPTIONS) for model in (MODEL, tied)]
    assert plans[0].ties == ()
    (tie,) = plans[1].ties
    assert (tie.name, tie.stages) == ("tokens.weight", (0, 1))
    size = tied.head.weight.numel() * 4
    assert tie.seconds >= 2 * size / (10**8 * 4)
    assert plans[1].predicted_seconds > plans[0].predicted_seconds
    assert "tokens.weight is on stages 0, 1" in str(plans[1])
    assert xm.ParallelPlan.from_json(plans[1].to_json()) == plans[1]
