"""Modules that are called as one, on several processes: experts of transformers under every sharding, others whole."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from planned_cases import in_turn
from random_plans import any_sharding, random_plan
from test_running import OPTIONS, check
from test_workloads import check as trained
from test_workloads import made
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.parallelism.assembly import planned_stage
from torch_xmesh.parallelism.cluster import HostKind
from torch_xmesh.parallelism.graph import ShardingGraph
from torch_xmesh.parallelism.layers import layers_of
from torch_xmesh.parallelism.recorded_forwards import forward_of
from torch_xmesh.parallelism.sharded import Sharded
from torch_xmesh.parallelism.space import Space
from torch_xmesh.parallelism.stages import FoundStage, Shape
from torch_xmesh.parallelism.stretch import Stretch
from torch_xmesh.testing import spawn

transformers: Any = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install -e .[models]"
)
MESHES = ((4,), (2, 2))


class Mixture(nn.Module):
    """Mixtral's experts between layers, with a router that is exact in float64, as its own is not; `is_lopsided`: it
    sends all tokens to the first two experts. Experts of a weight below `least` are left out."""

    def __init__(self, num_experts: int, *, is_lopsided: bool, least: float = 0.0) -> None:
        super().__init__()
        self.least = least
        config = transformers.MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=num_experts)
        config._experts_implementation = "eager"  # others compute in less than float64
        self.first, self.gate, self.last = nn.Linear(16, 16), nn.Linear(16, num_experts), nn.Linear(16, 16)
        self.experts = transformers.models.mixtral.modeling_mixtral.MixtralExperts(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.3)
        if is_lopsided:
            with torch.no_grad():
                self.gate.weight.copy_(torch.cat([9 * torch.ones(2, 16), torch.zeros(num_experts - 2, 16)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (self.first(x).relu() + 0.1).view(-1, 16)
        weights, index = self.gate(hidden).softmax(-1).topk(2, -1)
        index = index.masked_fill(weights < self.least, self.experts.num_experts)
        made = self.experts(hidden, index, weights / weights.sum(-1, keepdim=True))
        out: torch.Tensor = self.last(made.view(x.shape))
        return out


def of_choices(graph: ShardingGraph) -> list[Sharded]:
    """Each way to shard the experts, with what is cheapest around it."""
    (place,) = (i for i, one in enumerate(graph.stretch.operators) if one.kind == "MixtralExperts")
    choices = range(len(graph.space.choices(graph.stretch.operators[place])))
    return [graph.least(allowed=graph.narrowed(graph.everything(), place, i, is_taken=True)) for i in choices]


CASES: dict[str, tuple[tuple[int, int], int, bool, set[str]]] = {
    "even": ((4, 6), 8, False, {"t", "shown", "routed", "t shown", "shown routed", "routed routed", "shown shown"}),
    "lopsided": ((4, 6), 8, True, {"routed", "routed t", "routed shown", "routed routed"}),
    "odd experts": ((2, 3), 5, False, {"-", "t -", "- t"}),
    "odd tokens": ((1, 3), 6, False, {"-", "shown -", "- shown"}),
}
"""Samples and the length of each, experts, whether all tokens go to the first, and some of the choices there are."""


def runs(rank: int, world_size: int, name: str, is_forced: bool) -> None:
    torch.manual_seed(3)
    sizes, num_experts, is_lopsided, wanted = CASES[name]
    model = Mixture(num_experts, is_lopsided=is_lopsided, least=0.2).double()
    x = torch.randn(*sizes, 16).double()
    layers = layers_of(forward_of(model, (x,)), 1)
    kind = HostKind(4, xm.Compute(1e11, 1e10), None, 1e8)
    whole = xm.plan_parallel(model, (x,), devices=xm.Mesh(range(4)), **OPTIONS)
    seen = set()
    for shape in MESHES:
        links = [(size, 1e-5 / (axis + 1), 1e-9 / (axis + 1)) for axis, size in enumerate(shape)]
        space, mesh = Space(links, "ring", compute=kind.compute, num_microbatches=2), init_device_mesh("cpu", shape)
        graphs = [ShardingGraph(Stretch.of(layers.forward), space, zero=zero) for zero in range(4)]
        if is_forced:
            cases = [one for zero in range(4) for one in of_choices(graphs[zero])]
        else:
            cases = [any_sharding(graphs[seed % 4], Random(seed)) for seed in range(8)]
        for sharded in cases:
            found = FoundStage(0, 1, Shape((), kind, (space,)), (0, 1, 2, 3), space, sharded, 1)
            plan = dataclasses.replace(whole, stages=(planned_stage(layers, found, 1, 0),))
            pairs = zip(sharded.operators, sharded.choices, strict=True)
            (choice,) = (choice for one, choice in pairs if one.kind == "MixtralExperts")
            seen.add(str(choice))
            try:
                check(plan, copy.deepcopy(model), x, mesh)
            except Exception as error:
                raise AssertionError(f"{shape}, {choice}, {plan}") from error
    assert not is_forced or wanted <= seen, seen


ON_PARTS = [("even", True), ("lopsided", True), ("odd experts", False)]
MORE_ON_PARTS = [
    (name, forced) for forced in (False, True) for name in ("even", "lopsided", "odd experts", "odd tokens")
]


@pytest.mark.timeout(400)
def test_experts_on_parts_are_the_model() -> None:
    spawn(in_turn, 4, [(runs, case) for case in ON_PARTS], timeout=380)


@pytest.mark.soak
@pytest.mark.timeout(1000)
def test_more_experts_on_parts_are_the_model() -> None:
    spawn(in_turn, 4, [(runs, case) for case in MORE_ON_PARTS if case not in ON_PARTS], timeout=900)


def forced(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], label: str, zero: int) -> xm.ParallelPlan:
    """One stage on a mesh of (2, 2) whose experts are all sharded so."""
    layers = layers_of(forward_of(model, args, kwargs), 2)
    kind = HostKind(4, xm.Compute(1e11, 1e10), None, 1e8)
    space = Space([(2, 1e-5, 1e-9), (2, 1e-6, 1e-10)], "ring", compute=kind.compute, num_microbatches=2)
    graph = ShardingGraph(Stretch.of(layers.forward), space, zero=zero)
    allowed = graph.everything()
    for place, operator in enumerate(graph.stretch.operators):
        if operator.kind.endswith("Experts"):
            choices = [str(one) for one in space.choices(operator)]
            allowed = graph.narrowed(allowed, place, choices.index(label), is_taken=True)
    found = FoundStage(0, len(layers), Shape((), kind, (space,)), (0, 1, 2, 3), space, graph.least(allowed=allowed), 1)
    whole = xm.presets.data_parallel(
        model, args, example_kwargs=kwargs, devices=xm.Mesh(range(4)), overlap=False, **OPTIONS
    )
    return dataclasses.replace(whole, stages=(planned_stage(layers, found, 1, 0),))


def in_double(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model with arguments; Qwen's with its router's own loss."""
    model, args, kwargs = made(name)
    model.set_experts_implementation("eager")  # type: ignore[operator]
    model.config.output_router_logits = name == "Qwen3-MoE"  # type: ignore[union-attr]
    return model, args, kwargs


def trains_forced(rank: int, world_size: int, name: str, label: str, zero: int) -> None:
    model, args, kwargs = in_double(name)
    if label == "found":
        plan = xm.plan_parallel(model, args, example_kwargs=kwargs, devices=xm.Mesh([[0, 1], [2, 3]]), **OPTIONS)
    else:
        plan = forced(model, args, kwargs, label, zero)
    trained(model, args, kwargs, plan, is_priced=label == "found")


TRAINED = [("Mixtral", "found", 0), ("Mixtral", "t routed", 3), ("Qwen3-MoE", "shown routed", 1)]
MORE_TRAINED = [("Mixtral", "routed routed", 0), ("Mixtral", "shown t", 2), ("OLMoE", "routed t", 0)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cases", [TRAINED, pytest.param(MORE_TRAINED, marks=pytest.mark.soak)])
def test_models_of_experts_train_as_one_process(cases: Sequence[tuple[str, str, int]]) -> None:
    spawn(in_turn, 4, [(trains_forced, case) for case in cases], timeout=380)


def trains_any(rank: int, world_size: int, seeds: range) -> None:
    for seed in seeds:
        model, args, kwargs = in_double("Mixtral")
        plan = random_plan(model, args, kwargs, Random(seed))
        try:
            trained(model, args, kwargs, plan, is_priced=False)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}\n{plan}") from error


def test_random_plans_of_experts_train_as_one_process() -> None:
    spawn(trains_any, 4, range(4), timeout=300)


@pytest.mark.soak
def test_many_random_plans_of_experts_train_as_one_process() -> None:
    spawn(trains_any, 4, range(4, 40), timeout=900)


def runs_in_single(rank: int, world_size: int, implementation: str) -> None:
    """The ways that transformers has to compute experts; of rows that may be none."""
    for label in ("routed routed", "shown shown"):
        torch.manual_seed(3)
        model, x = Mixture(8, is_lopsided=label == "shown shown"), torch.randn(4, 6, 16)
        model.experts.config._experts_implementation = implementation
        whole = copy.deepcopy(model)
        with xm.PipelineEngine(model, (x,), plan=forced(model, (x,), {}, label, 3), loss_fn=F.mse_loss) as engine:
            batch = torch.cat([x, x.flip(0)])
            target = torch.randn_like(batch)
            engine.step(batch, target=target)
            loss = F.mse_loss(whole(batch), target)
            loss.backward()  # type: ignore[no-untyped-call]
            assert engine.last_loss() == pytest.approx(loss.item(), rel=1e-5)
            for key, parameter in engine.named_parameters():
                found, expected = parameter.grad, whole.get_parameter(key).grad
                assert isinstance(found, DTensor)
                torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-4, atol=1e-6, msg=key)
            engine.eval()
            engine.evaluate(batch, target=target)
            assert engine.last_loss() == pytest.approx(loss.item(), rel=1e-5)


def test_each_way_to_compute_experts() -> None:
    spawn(in_turn, 4, [(runs_in_single, (implementation,)) for implementation in ("grouped_mm", "batched_mm")])


class Sorted(nn.Module):
    """Each row goes to the layer of its greatest element: that cannot be looked into. The last two layers are one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.layers.append(self.layers[-1])
        self.register_buffer("scale", torch.linspace(0.5, 2, 16))
        self.dropout = nn.Dropout()

    def forward(self, x: torch.Tensor, *, factor: float) -> torch.Tensor:
        out, which = torch.zeros_like(x), x.argmax(-1) % 4
        for number in torch.unique(which):
            rows = (which == number).nonzero().flatten()
            made = self.layers[int(number)](x[rows]) * (self.get_buffer("scale") * factor)
            out = out.index_add(0, rows, made)
        dropped: torch.Tensor = self.dropout(out)
        return dropped


class Sorting(nn.Module):
    """The head is the first layer of what sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.sorted = nn.ModuleList(Sorted() for _ in range(3))
        self.head = nn.Linear(16, 16)
        self.head.weight = self.sorted[0].layers[0].weight  # type: ignore[union-attr, index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, one in zip(self.layers, self.sorted, strict=True):
            x = x + one(layer(x), factor=0.5)
        out: torch.Tensor = self.head(x)
        return out


def trains_called(rank: int, world_size: int, seeds: range) -> None:
    torch.manual_seed(3)
    model, x = Sorting().double().eval(), torch.randn(8, 16).double()
    assert sum(one.kind == "Sorted" for one in forward_of(model, (x,)).operators) == 3
    for seed in seeds:
        plan = random_plan(model, (x,), {}, Random(seed))
        try:
            trained(copy.deepcopy(model), (x,), {}, plan, is_priced=False)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}\n{plan}") from error
    plan = xm.presets.data_parallel(model, (x,), devices=xm.Mesh(range(4)), num_layers=1, **OPTIONS)
    whole = copy.deepcopy(model)
    with xm.PipelineEngine(model, (x,), plan=plan, loss_fn=F.mse_loss) as engine:
        names = set(engine.state_dict())
        assert {"sorted.0.scale", "sorted.2.scale"} <= names, names
        state = {name: one * 2 if name == "sorted.1.scale" else one for name, one in engine.state_dict().items()}
        engine.load_state_dict(state)
        whole.get_buffer("sorted.1.scale").mul_(2)
        batch = torch.cat([x, x.flip(0)])
        engine.evaluate(batch, target=batch)
        assert engine.last_loss() == pytest.approx(F.mse_loss(whole(batch), batch).item(), rel=1e-9)
        engine.train()
        engine.step(batch, target=batch)  # all devices drop the same
        mine = [one.grad.full_tensor() for one in engine.parameters()]  # type: ignore[union-attr]
        found: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
        dist.all_gather_object(found, mine)
        assert any(one.any() for one in mine)
        assert all(torch.equal(one, other) for others in found for one, other in zip(mine, others, strict=True))


def test_a_module_that_is_called_as_one_runs_whole() -> None:
    spawn(trains_called, 4, range(8), timeout=240)


def runs_whole(rank: int, world_size: int) -> None:
    torch.manual_seed(3)
    model, x = nn.Sequential(nn.Linear(16, 16), Mixture(4, is_lopsided=True)).double(), torch.randn(4, 6, 16).double()
    options = {**OPTIONS, "num_layers": 2, "schedule": "zb_h1"}
    plan = xm.presets.pipeline(model, (x,), devices=xm.Mesh(range(2)), num_stages=2, **options)
    batch = torch.cat([x, x.flip(0)])
    with xm.PipelineEngine(copy.deepcopy(model), (x,), plan=plan, loss_fn=F.mse_loss) as engine:
        engine.step(batch, target=batch)
        found, text = dict(engine.named_parameters()), engine.summary()
    assert "stage 1: I is the whole backward and W nothing, since a planned stage with experts" in text, text
    F.mse_loss(model(batch), batch).backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if name in found:
            mine = found[name].grad
            assert isinstance(mine, DTensor), name
            torch.testing.assert_close(mine.full_tensor(), parameter.grad, msg=name)


def test_the_backward_of_a_stage_with_experts_is_not_split() -> None:
    """Devices would split it in different ways: with no tokens for its experts one has nothing to compute later."""
    spawn(runs_whole, 2, timeout=240)
