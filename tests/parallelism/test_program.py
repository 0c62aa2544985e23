"""Programs of what is found for stages: an independent validator follows every value and gradient through each."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
import torch
from library_arguments import ARGUMENTS, made
from random_plans import any_sharding
from running_models import RANDOM

import torch_xmesh as xm
from torch_xmesh.parallelism.assembly import check_stage
from torch_xmesh.parallelism.cluster import HostKind
from torch_xmesh.parallelism.graph import ShardingGraph
from torch_xmesh.parallelism.loops import PARTIAL, End
from torch_xmesh.parallelism.operators import Forward
from torch_xmesh.parallelism.program import program_of
from torch_xmesh.parallelism.recorded_forwards import forward_of
from torch_xmesh.parallelism.sharded import Sharded
from torch_xmesh.parallelism.space import Space
from torch_xmesh.parallelism.stages import FoundStage, Shape
from torch_xmesh.parallelism.stretch import Stretch


def small(name: str) -> Forward:
    """A small model's, in double precision."""
    torch.manual_seed(3)
    model, x = RANDOM[name]()
    return forward_of(model.double(), (x.double() if x.is_floating_point() else x,))


def space_of(*shape: int) -> Space:
    links = [(size, 1e-5 / (axis + 1), 1e-9 / (axis + 1)) for axis, size in enumerate(shape)]
    return Space(links, "ring", compute=xm.Compute(1e11, 1e10), num_microbatches=2)


@pytest.mark.parametrize("name", RANDOM)
def test_any_sharding_is_a_program_that_fits(name: str) -> None:
    forward = small(name)
    for seed in range(12):
        shape = (4,) if seed % 3 == 0 else (2, 2)
        graph = ShardingGraph(Stretch.of(forward), space_of(*shape), zero=seed % 4)
        program_of(any_sharding(graph, Random(seed))).validate()


def test_stages_that_begin_anywhere_are_programs_that_fit() -> None:
    forward = small("tied gpt")
    places = [number for number, operator in enumerate(forward.operators) if not operator.is_constant]
    for seed in range(20):
        random = Random(seed)
        begin, end = sorted(random.sample(range(len(places) + 1), 2))
        stretch = Stretch.of(forward, places[begin:end])
        program_of(any_sharding(ShardingGraph(stretch, space_of(2, 2)), random)).validate()


@pytest.mark.parametrize("family", sorted(ARGUMENTS))
def test_models_of_libraries_are_programs_that_fit(family: str) -> None:
    torch.manual_seed(3)
    model, args, kwargs = made(family)
    forward = forward_of(model, args, kwargs)
    for seed, shape in enumerate([(4,), (2, 2)]):
        program_of(any_sharding(ShardingGraph(Stretch.of(forward), space_of(*shape)), Random(seed))).validate()


def test_segments_are_what_is_computed_between_collectives() -> None:
    """Two layers of Megatron's: the first shards its outputs, the second adds up."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8), torch.nn.ReLU())
    stretch = Stretch.of(forward_of(model, (torch.zeros(4, 8),)))
    graph = ShardingGraph(stretch, space_of(4))
    allowed = graph.everything()
    for place, (operator, label) in enumerate(zip(stretch.operators, ["j", "b", "k", "-"], strict=True)):
        choices = graph.space.choices(operator)
        wanted = [at for at, choice in enumerate(choices) if place in (0, 2) and choice.axes == (label,)]
        for choice in wanted:
            allowed = graph.narrowed(allowed, place, choice, is_taken=True)
    sharded = graph.least(allowed=allowed)
    assert PARTIAL in sharded.choices[2].outputs[0].value
    program = program_of(sharded)
    program.validate()
    assert program.segments() == [0, 3]


def test_what_was_not_found_so_is_refused() -> None:
    graph = ShardingGraph(Stretch.of(small("gpt")), space_of(4))
    sharded = any_sharding(graph, Random(0))

    def with_choice(place: int, choice: object) -> Sharded:
        changed = Sharded(sharded.graph, sharded.chosen, sharded.bytes, sharded.cost)
        choices = list(sharded.choices)
        choices[place] = choice  # type: ignore[call-overload]
        changed.__dict__["choices"] = tuple(choices)
        return changed

    refused = 0
    for place, choice in enumerate(sharded.choices):
        if sharded.operators[place].is_constant or not choice.outputs:
            continue
        (value, *others) = choice.outputs
        end = End((PARTIAL,), value.gradient)
        if value.value == end.value:
            continue
        wrong = with_choice(place, dataclasses.replace(choice, outputs=(end, *others)))
        with pytest.raises(ValueError, match=sharded.operators[place].name):
            program_of(wrong).validate()
        refused += 1
    assert refused > 20
    shape = Shape((), HostKind(4, xm.Compute(1e11, 1e10), None, 1e8), (graph.space,))
    check_stage(FoundStage(0, 1, shape, (0, 1, 2, 3), graph.space, sharded, 1), 3)
    with pytest.raises(RuntimeError, match="stage 3 of the plan that was found does not fit together"):
        check_stage(FoundStage(0, 1, shape, (0, 1, 2, 3), graph.space, wrong, 1), 3)
