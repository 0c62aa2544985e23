"""A model and devices in, a plan out: its stages, its text, what it refuses."""

from __future__ import annotations

import dataclasses
import importlib
import io
import itertools
import json
import random
import re
import signal
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from library_arguments import ARGUMENTS, made
from shardings import shard_stretch
from small_models import Gpt
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_xmesh as xm
from torch_xmesh import _C
from torch_xmesh.parallelism.layers import layers_of
from torch_xmesh.parallelism.overlap import simulated
from torch_xmesh.parallelism.recorded_forwards import forward_of
from torch_xmesh.parallelism.space import Space
from torch_xmesh.parallelism.step_plot import at_end_of
from torch_xmesh.parallelism.stretch import Stretch
from torch_xmesh.parallelism.stretch_tables import StretchTables, parameter_bytes
from torch_xmesh.parallelism.zero import with_zero

TOKENS = torch.zeros(8, 16, dtype=torch.int64)
RATES = xm.Compute(flops=1e11, bytes_per_s=1e10)


def mesh(num_hosts: int, num_devices: int) -> xm.Mesh:
    return xm.Mesh(torch.arange(num_hosts * num_devices).reshape(num_hosts, num_devices))


def slow_network(num_devices: int) -> xm.Topology:
    return xm.Topology(devices_per_host=num_devices, nic_bytes_per_s=10**8, local_bytes_per_s=10**10)


def planned(model: nn.Module | None = None, args: tuple[Any, ...] = (TOKENS,), **more: Any) -> xm.ParallelPlan:
    options: dict[str, Any] = {
        "devices": mesh(2, 2),
        "num_microbatches": 4,
        "compute": RATES,
        "topology": slow_network(2),
        **more,
    }
    return xm.plan_parallel(model or Gpt(num_layers=4), args, **options)


def check_whole(plan: xm.ParallelPlan, model: nn.Module) -> None:
    """Each device once, each layer once, each parameter somewhere, states that divide."""
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    assert sorted(ranks) == list(range(plan.devices))
    ends = [0, *(stage.layers[1] for stage in plan.stages)]
    assert [stage.layers[0] for stage in plan.stages] == ends[:-1]
    assert ends[-1] == len(plan.layers)
    kept = {one.name for stage in plan.stages for one in stage.parameters}
    assert {name for name, _ in model.named_parameters()} <= kept
    assert xm.ParallelPlan.from_json(plan.to_json()) == plan


def test_a_plan_from_end_to_end(tmp_path: Path) -> None:
    model = Gpt(num_layers=4)
    plan = planned(model)
    check_whole(plan, model)
    text = str(plan)
    assert text.startswith(f"Gpt on 4 devices (found): {len(plan.stages)} stage")
    assert "stage 0 on " in text
    assert plan.predicted_seconds == plan.step.total > 0
    assert plan.predicted_bytes(0) == plan.stages[0].peak_bytes
    with pytest.raises(ValueError, match="no stage is on device 9"):
        plan.predicted_bytes(9)
    explained = plan.explain("layers.1.query")
    assert explained.startswith("layers.1.query.linear [8, 16, 64] on stage ")
    assert explained.count("\n>") == 1
    assert "layers.1.up.linear" in plan.explain("layers.1.up.weight")
    with pytest.raises(ValueError, match="no operator, module or parameter named 'layers.9'"):
        plan.explain("layers.9")
    plan.save(tmp_path / "plan.json")
    read = xm.ParallelPlan.load(tmp_path / "plan.json")
    assert read == plan
    with pytest.raises(ValueError, match="not one that was read"):
        read.explain("layers.1.query")
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


@pytest.mark.parametrize("preset", ["found", "zero_3", "pipeline"])
@pytest.mark.parametrize("schedule", ["auto", "zb_h1"])
def test_a_picture_shows_the_step_that_was_predicted(preset: str, schedule: str) -> None:
    """ZeRO-3's backward is not split, whatever the schedule says."""
    options: dict[str, Any] = {"devices": mesh(2, 2), "num_microbatches": 4, "compute": RATES, "schedule": schedule}
    options["topology"] = slow_network(2)
    model = Gpt(num_layers=4)
    plans: dict[str, Callable[[], xm.ParallelPlan]] = {
        "found": lambda: xm.plan_parallel(model, (TOKENS,), **options),
        "zero_3": lambda: xm.presets.zero_3(model, (TOKENS,), **options),
        "pipeline": lambda: xm.presets.pipeline(model, (TOKENS,), num_stages=4, **options),
    }
    plan = plans[preset]()
    ends = dict.fromkeys(range(len(plan.stages)), 0.0)
    played = simulated(plan)
    for action in played.actions:
        ends[action.place] = max(ends[action.place], action.end_seconds)
    for transfer in played.transfers:
        ends[transfer.to_stage] = max(ends[transfer.to_stage], transfer.end_seconds)
    step = max(end + at_end_of(plan, number) for number, end in ends.items())
    assert step == pytest.approx(plan.predicted_seconds, rel=1e-9)


def test_a_slow_network_makes_stages_and_a_fast_one_does_not() -> None:
    fast = planned(
        topology=xm.Topology(devices_per_host=2, nic_bytes_per_s=10**13, local_bytes_per_s=10**13, latency_us=0.001)
    )
    slow = planned(num_microbatches=16)
    assert len(slow.stages) > 1
    assert all(len({rank // 2 for rank in stage.ranks}) == 1 for stage in slow.stages)
    assert fast.predicted_seconds < slow.predicted_seconds


def test_the_same_plan_everywhere() -> None:
    """Again, and on meta."""
    with torch.device("meta"):
        on_meta = Gpt(num_layers=4)
    assert planned().to_json() == planned().to_json() == planned(on_meta).to_json()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_models_nobody_here_wrote(name: str) -> None:
    model, args, kwargs = made(name)
    plan = xm.plan_parallel(
        model, args, kwargs, devices=mesh(2, 2), num_microbatches=4, compute=RATES, topology=slow_network(2)
    )
    check_whole(plan, nn.ParameterDict())
    assert not any("without a row" in note for note in plan.notes)


def test_memory_is_kept_or_refused_with_what_would_do() -> None:
    """The smallest limit that is named is one that does; a byte less is refused."""
    free = planned()
    most = max(stage.peak_bytes for stage in free.stages)
    tight = planned(memory_limit_bytes=int(most * 0.9))
    assert max(stage.peak_bytes for stage in tight.stages) <= most * 0.9
    with pytest.raises(ValueError, match=r"no plan keeps memory_limit_bytes=1000: the smallest limit") as refused:
        planned(memory_limit_bytes=1000)
    (named,) = re.findall(r"that one keeps is (\d+)", str(refused.value))
    assert max(stage.peak_bytes for stage in planned(memory_limit_bytes=int(named)).stages) <= int(named)
    with pytest.raises(ValueError, match=f"that one keeps is {named}"):
        planned(memory_limit_bytes=int(named) - 1)


@pytest.mark.parametrize("num_devices", [4, 8])
def test_a_limit_that_a_preset_keeps_is_kept_and_no_plan_is_slower_than_it(num_devices: int) -> None:
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), torch.randn(16, 64)
    for subject, given in ((model, x), (Gpt(num_layers=4), torch.zeros(8, 16, dtype=torch.int64))):
        options: dict[str, Any] = {"devices": xm.Mesh(range(num_devices)), "num_microbatches": 4}
        for preset in (
            xm.presets.data_parallel(subject, (given,), **options),
            xm.presets.zero_2(subject, (given,), **options),
            xm.presets.zero_3(subject, (given,), **options),
            xm.presets.megatron(subject, (given,), tensor_parallel=2, **options),
            xm.presets.pipeline(subject, (given,), num_stages=2, **options),
            xm.presets.pipeline(subject, (given,), num_stages=4, zero=3, **options),
        ):
            limit = max(stage.peak_bytes for stage in preset.stages)
            found = xm.plan_parallel(subject, (given,), memory_limit_bytes=limit, **options)
            assert max(stage.peak_bytes for stage in found.stages) <= limit, preset
            assert found.predicted_seconds <= 1.0001 * preset.predicted_seconds, preset


def test_hosts_that_differ_get_what_they_can_do() -> None:
    """A host with a third of the speed gets fewer of the operations."""
    rates = {0: RATES, 1: xm.Compute(RATES.flops / 3, RATES.bytes_per_s / 3)}
    plan = planned(Gpt(num_layers=8), num_microbatches=16, compute=rates)
    sizes = {0: 0, 1: 0}
    for stage in plan.stages:
        assert len({rank // 2 for rank in stage.ranks}) == 1
        sizes[stage.ranks[0] // 2] += stage.layers[1] - stage.layers[0]
    assert sizes[0] > 1.5 * sizes[1]


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="num_microbatches must be a positive int, got 0"):
        planned(num_microbatches=0)
    with pytest.raises(ValueError, match="unknown schedule 'best'"):
        planned(schedule="best")
    with pytest.raises(ValueError, match="no cost model of collectives named 'tree': they are auto, alpa, ring, gloo"):
        planned(collectives="tree")
    with pytest.raises(ValueError, match="max_seconds is a positive number or None, got -1"):
        planned(max_seconds=-1)

    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    with pytest.raises(ValueError, match="computes nothing from its parameters"):
        planned(Nothing())

    class Breaks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("no")

    with pytest.raises(ValueError, match="Breaks cannot be recorded"):
        planned(Breaks())


def test_what_is_read_is_checked() -> None:
    plan = planned()
    assert len(plan.stages) > 1

    def changed(change: Any) -> str:
        fields = json.loads(plan.to_json())
        change(fields)
        return json.dumps(fields)

    cases: list[tuple[Any, str]] = [
        (lambda one: one.update(version=3), "a JSON object of version 1 or 2"),
        (lambda one: one.pop("stages"), "plan: no field 'stages'"),
        (lambda one: one.update(extra=1), "plan: an unknown field 'extra'"),
        (lambda one: one["stages"][0].pop("ranks"), r"plan\.stages\[0\]: no field 'ranks'"),
        (lambda one: one["stages"][0].update(ranks=[0, 0]), "device 0 is in two stages"),
        (lambda one: one["stages"][0].update(mesh_shape=[7]), r"plan\.stages\[0\]: \d ranks in a mesh of \[7\]"),
        (
            lambda one: one["stages"][0]["parameters"][0].update(state=[9] * len(one["stages"][0]["mesh_shape"])),
            "has no dim 9",
        ),
        (lambda one: one["stages"][0].update(ranks=3), r"plan\.stages\[0\]\.ranks: expected a list, got 3 \(int\)"),
        (lambda one: one["stages"][0].update(layers=[0, 99]), "stages do not follow one another through the"),
        (lambda one: one["stages"][0].update(layers=[0]), r"layers: expected a list of 2, got \[0\]"),
        (lambda one: one.update(schedule_csv="garbage"), "garbage"),
        (
            lambda one: one.update(schedule_csv="0F0,0B0"),
            "plan.schedule_csv: of 1 stages and 1 microbatches, the plan has",
        ),
        (lambda one: one.update(num_microbatches=-1), "num_microbatches: expected at least 1, got -1"),
        (lambda one: one.update(num_microbatches=True), r"num_microbatches: expected int, got True \(bool\)"),
        (lambda one: one.update(stages=[]), "plan: no stages"),
        (lambda one: one.update(devices=9), "plan.devices: 9, the stages have 4"),
        (lambda one: one["stages"][0]["operators"][0].update(axes=[]), "has 0 axes on a mesh of"),
        (lambda one: one["stages"][0]["operators"][0].update(name=None), r"name: expected str, got None"),
        (lambda one: one["stages"][0]["operators"][-1].update(layer=99), "is of layer 99"),
        (lambda one: one["stages"][0]["parameters"][0].update(state=["a"]), r"state\[0\]: expected int, got 'a'"),
        (lambda one: one["stages"][0]["parameters"][0].update(zero_level=7), "has ZeRO level 7"),
        (lambda one: one["step"].update(total="soon"), r"plan\.step\.total: expected float, got 'soon' \(str\)"),
        (lambda one: one["values"][0].update(to_stage=0), r"plan\.values\[0\]: from stage 0 to stage 0"),
        (lambda one: one.update(ties=[{"name": "x", "stages": [0], "seconds": 1}]), r"plan\.ties\[0\]: stages \[0\]"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            xm.ParallelPlan.from_json(changed(change))
    with pytest.raises(ValueError, match="plan: not JSON"):
        xm.ParallelPlan.from_json("{")


def test_what_differs_between_plans() -> None:
    one, other = planned(), planned(schedule="gpipe", num_microbatches=8)
    assert one.diff(one) == ""
    text = one.diff(other)
    assert "- microbatches: 4\n+ microbatches: 8" in text
    assert f"+ schedule: {other.schedule}" in text
    moved = dataclasses.replace(one, stages=(dataclasses.replace(one.stages[0], operators=()), *one.stages[1:]))
    assert "+ tokens.embedding: absent" in one.diff(moved)
    elsewhere = dataclasses.replace(one.stages[0], ranks=tuple(rank + 9 for rank in one.stages[0].ranks))
    assert "+ stages: " in one.diff(dataclasses.replace(one, stages=(elsewhere, *one.stages[1:])))


def test_layers_are_the_models_blocks() -> None:
    layers = layers_of(forward_of(Gpt(num_layers=6), (TOKENS,)))
    assert len(layers) == 8  # the fewest
    many = layers_of(forward_of(Gpt(num_layers=12), (TOKENS,)))
    assert len(many) == 12
    for end in range(1, len(many)):
        crossing = Stretch.of(many.forward, many.operators(end, len(many))).entering
        assert [value.num_bytes for value in crossing] == [8 * 16 * 64 * 4], "cut where one value crosses"
    flat = [number for layer in many.numbers for number in layer]
    assert flat == sorted(flat)
    constant = {i for i, one in enumerate(many.forward.operators) if one.is_constant}
    assert {*flat} | constant == set(range(len(many.forward.operators)))
    assert constant & set(many.operators(0, 1))


def test_tables_of_stretches_are_sums() -> None:
    """Against each stretch added up by itself, a tied parameter counted once."""

    class Tied(Gpt):
        def __init__(self) -> None:
            super().__init__(num_layers=4)
            self.head.weight = self.tokens.weight

    layers = layers_of(forward_of(Tied(), (TOKENS,)))
    space = Space([(2, 1e-5, 1e-9), (2, 1e-6, 1e-10)], "ring", compute=RATES, num_microbatches=4)
    sharded = with_zero(shard_stretch(Stretch.of(layers.forward), space), 2)
    seconds, fixed, _ = StretchTables(layers, sharded.graph.stretch).of(sharded)
    count = len(layers)
    for first, last in itertools.combinations_with_replacement(range(count), 2):
        numbers = [number for layer in layers.numbers[first : last + 1] for number in layer]
        wanted = sum(space.cost(sharded.spent[number]) for number in numbers)
        assert seconds[first * count + last] == pytest.approx(wanted, abs=1e-12)
        names = {v.name for number in numbers for v in sharded.operators[number].reads if v.is_parameter}
        held = sum(parameter_bytes(space, *sharded.parameters[name], sharded.in_parts.get(name)) for name in names)
        assert fixed[first * count + last] == pytest.approx(held, abs=1)
    assert fixed[count - 1] == pytest.approx(sharded.bytes.fixed, abs=1)


def test_tables_have_the_largest_checkpoint_of_a_stretch() -> None:
    """Which is computed anew beside what all layers hold."""

    class Checkpointed(Gpt):
        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            x = self.tokens(indices)
            for number, layer in enumerate(self.layers.children()):
                x = layer(x) if number == 1 else checkpoint(layer, x, use_reentrant=False)
            out: torch.Tensor = self.head(x)
            return out

    layers = layers_of(forward_of(Checkpointed(num_layers=4), (TOKENS,)))
    sharded = shard_stretch(Stretch.of(layers.forward), Space([(1, 0.0, 0.0)], "ring", compute=RATES))
    _, fixed, _ = StretchTables(layers, sharded.graph.stretch).of(sharded)
    layer_of, count = layers.layer_of(), len(layers)
    again = [Counter[int]() for _ in range(3)]
    for one, found in zip(again, sharded.again.values(), strict=True):
        for number, num_bytes in zip(*found, strict=True):
            one[layer_of[int(number)]] += int(num_bytes)
    for first, last in itertools.combinations_with_replacement(range(count), 2):
        numbers = [number for layer in layers.numbers[first : last + 1] for number in layer]
        names = {v.name for number in numbers for v in sharded.operators[number].reads if v.is_parameter}
        held = sum(parameter_bytes(sharded.graph.space, *sharded.parameters[name]) for name in names)
        held += max(sum(one[layer] for layer in range(first, last + 1)) for one in again)
        assert fixed[first * count + last] == pytest.approx(held, abs=1)
    assert fixed[count - 1] == pytest.approx(sharded.bytes.fixed, abs=1)


def test_alpas_own_stage_search() -> None:
    """Its test of the dynamic program: 8 layers on 1 x 8 devices, 16 microbatches, costs of its random numbers."""
    generator = np.random.RandomState(42)
    num_layers, submeshes = 8, [(1, 1), (1, 2), (1, 4), (1, 8)]
    problem = _C.StageProblem(
        num_layers, 16, [8], [([hosts * devices], 2**62) for hosts, devices in submeshes], list(range(1, 9))
    )
    table = generator.rand(num_layers, num_layers, len(submeshes), 5)
    for submesh in range(len(submeshes)):
        for config in range(5):
            flat = table[:, :, submesh, config].ravel().tolist()
            problem.add_options(submesh, flat, [0] * len(flat), [0] * len(flat))
    found = problem.best_plans(1)
    assert found[0][1]
    assert found[0][0] == pytest.approx(0.2952851, rel=1e-6)
    assert found[0][0] == pytest.approx(brute_force(table, 16), rel=1e-12)


def test_the_search_hears_an_interrupt() -> None:
    problem = _C.StageProblem(2, 1, [1], [([1], 2**62)], [1, 1])
    problem.add_options(0, [1.0] * 4, [0] * 4, [0] * 4)

    def interrupted() -> bool:
        signal.raise_signal(signal.SIGINT)
        return True

    with pytest.raises(KeyboardInterrupt):
        problem.best_plans(1, go_on=interrupted)


def test_an_end_of_the_time() -> None:
    """Before a plan is found that is what is said; later the best so far is returned, and the plan says so."""
    with pytest.raises(ValueError, match="max_seconds were over before a plan was found"):
        planned(max_seconds=1e-9)


def brute_force(table: Any, num_microbatches: int) -> float:
    """All stages and submeshes."""
    best = float("inf")
    num_layers = table.shape[0]
    sizes = [1, 2, 4, 8]
    cheapest = table.min(-1)

    def go(first: int, devices: int, times: list[float]) -> None:
        nonlocal best
        if first == num_layers:
            if devices == 0:
                best = min(best, sum(times) + (num_microbatches - 1) * max(times))
            return
        if times and sum(times) + (num_microbatches - 1) * max(times) >= best:
            return
        for last in range(first, num_layers):
            for submesh, size in enumerate(sizes):
                if size <= devices:
                    go(last + 1, devices - size, [*times, float(cheapest[first, last, submesh])])

    go(0, 8, [])
    return best


def test_random_small_models_and_clusters() -> None:
    """Plans of models made by chance are whole; a stage's own sharding costs no more than the tables said."""
    chance = random.Random(0)
    for _ in range(8):
        layers = [nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()]
        chance.shuffle(layers)
        model = nn.Sequential(*layers * chance.choice([1, 2]))
        hosts, devices = chance.choice([(1, 2), (2, 1), (2, 2), (1, 4), (3, 2)])
        plan = planned(
            model,
            (torch.zeros(chance.choice([8, 12]), 16),),
            devices=mesh(hosts, devices),
            topology=slow_network(devices),
            num_microbatches=chance.choice([1, 3, 8]),
        )
        check_whole(plan, nn.ParameterDict())


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_long_search_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    """A bar that is written over on a terminal, few lines in a file."""
    module = importlib.import_module("torch_xmesh.parallelism.plan_parallel")
    now, written = [0.0], io.StringIO()
    monkeypatch.setattr(written, "isatty", lambda: is_terminal)
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(module.sys, "stderr", written)
    with module._Progress(None) as progress:
        for done in range(70):
            now[0] = float(done)
            assert progress.tell(done, 70)
    if is_terminal:
        assert written.getvalue().count("\r") == 67  # from the third second on
        assert written.getvalue().endswith("69/70 meshes, 69 s\n")
    else:
        lines = ["torch_xmesh: planning, 31/70 meshes, 31 s", "torch_xmesh: planning, 62/70 meshes, 62 s"]
        assert written.getvalue().splitlines() == lines
