"""Programs of what is found for stages: an independent validator follows every value and gradient through each."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import pytest
import torch
from library_arguments import ARGUMENTS, made
from random_plans import any_sharding, random_case
from running_models import RANDOM
from torch import nn

import torch_xmesh as xm
from torch_xmesh import _C
from torch_xmesh.parallelism import assembly
from torch_xmesh.parallelism.assembly import Subject, assembled, planned_stage
from torch_xmesh.parallelism.bound_program import BoundProgram
from torch_xmesh.parallelism.cluster import Cluster, HostKind, cluster_of
from torch_xmesh.parallelism.forward_modes import ForwardModes, runnable
from torch_xmesh.parallelism.graph import ShardingGraph
from torch_xmesh.parallelism.judge import Judge
from torch_xmesh.parallelism.layers import Layers, layers_of
from torch_xmesh.parallelism.loops import PARTIAL
from torch_xmesh.parallelism.operators import Forward
from torch_xmesh.parallelism.plan import ParallelPlan
from torch_xmesh.parallelism.plan_checks import check_programs
from torch_xmesh.parallelism.program import PlannedProgram, core_programs, validate
from torch_xmesh.parallelism.program_writer import with_programs
from torch_xmesh.parallelism.segment_layout import SegmentLayout
from torch_xmesh.parallelism.sharded import Sharded
from torch_xmesh.parallelism.space import Space
from torch_xmesh.parallelism.stages import FoundPlan, FoundStage, Shape
from torch_xmesh.parallelism.stretch import Stretch

RATES = xm.Compute(1e11, 1e10)


def small(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A small model in double precision."""
    torch.manual_seed(3)
    model, x = RANDOM[name]()
    return model.double(), (x.double() if x.is_floating_point() else x,)


def space_of(*shape: int) -> Space:
    links = [(size, 1e-5 / (axis + 1), 1e-9 / (axis + 1)) for axis, size in enumerate(shape)]
    return Space(links, "ring", compute=RATES, num_microbatches=2)


@dataclasses.dataclass(frozen=True)
class Planner:
    """Plans of one stage on four devices, of what is found for it."""

    modes: ForwardModes
    layers: Layers
    cluster: Cluster

    @staticmethod
    def of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Planner:
        modes = runnable(model, args, kwargs, checks_next=False)
        layers = layers_of(modes.recorded.forward, 1)
        return Planner(modes, layers, cluster_of(xm.Mesh(range(4)), None, RATES, None))

    @property
    def forward(self) -> Forward:
        return self.modes.recorded.forward

    def plan(self, space: Space, sharded: Sharded) -> ParallelPlan:
        """What was found as a plan, which is checked as all are."""
        judge = Judge(self.cluster, 2, "1f1b")
        judged = judge.judged(FoundPlan((self.stage(space, sharded),), is_proven=False))
        assert judged is not None
        return assembled(Subject("Model", self.modes, self.layers, self.cluster, 2, "ring", "1f1b"), judged, judge)

    def stage(self, space: Space, sharded: Sharded) -> FoundStage:
        shape = Shape((), HostKind(4, RATES, None, 1e8), (space,))
        return FoundStage(0, len(self.layers), shape, (0, 1, 2, 3), space, sharded, 1)


@pytest.mark.parametrize("name", RANDOM)
def test_any_sharding_is_a_program_that_fits(name: str) -> None:
    planner = Planner.of(*small(name))
    for seed in range(12):
        space = space_of(4) if seed % 3 == 0 else space_of(2, 2)
        graph = ShardingGraph(Stretch.of(planner.forward), space, zero=seed % 4)
        plan = planner.plan(space, any_sharding(graph, Random(seed)))
        assert {program.mode for program in plan.stages[0].programs} in ({"both"}, {"training", "evaluation"})
        check_passed(planner, plan)


def check_passed(planner: Planner, plan: ParallelPlan) -> None:
    """What goes between segments: the moves lead from end to end, and a transfer leaves nobody summands."""
    (stage,) = plan.stages
    program = next(one for one in stage.programs if one.does("training" if planner.modes.is_training else "evaluation"))
    bound = BoundProgram(planner.modes.recorded, program)
    cores = core_programs(program, stage.mesh_shape, stage.parameters)
    for core, is_whole in zip(cores, (False, True), strict=True):
        layout = SegmentLayout(bound, program, core, is_whole=is_whole)
        assert layout.count == max(1, len(program.segments))
        assert sorted(number for own in layout.operators for number in own) == sorted(bound.operators)
        for one in layout.passed:
            assert one.from_segment < one.to_segment
            assert one.source in layout.outputs[one.from_segment]
            assert one.key in layout.inputs[one.to_segment]
            there, back = (one.there, *one.ends[:2]), (one.back, *one.ends[2:])
            for moves, begin, end in (there, back) if one.has_gradient else (there,):
                state = list(begin)
                for move in moves:
                    assert state[move.axis] == move.before
                    state[move.axis] = move.after
                assert tuple(state) == end, one
                assert not one.is_sent or PARTIAL not in end, one


def test_stages_that_begin_anywhere_are_programs_that_fit() -> None:
    """Each plan is checked where it is made, and what crosses, where it is read."""
    for seed in range(20):
        plan = random_case(seed).plan
        assert all(stage.programs for stage in plan.stages)
        assert xm.ParallelPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("family", sorted(ARGUMENTS))
def test_models_of_libraries_are_programs_that_fit(family: str) -> None:
    torch.manual_seed(3)
    planner = Planner.of(*made(family))
    for seed, shape in enumerate([(4,), (2, 2)]):
        space = space_of(*shape)
        planner.plan(space, any_sharding(ShardingGraph(Stretch.of(planner.forward), space), Random(seed)))


def core_of(plan: ParallelPlan) -> _C.Program:
    (stage,) = plan.stages
    return validate(stage.programs[0], stage.mesh_shape, stage.parameters)[0]


def test_segments_are_what_is_computed_between_collectives() -> None:
    """Two layers of Megatron's: the first shards its outputs, the second adds up."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU())
    planner, space = Planner.of(model, (torch.zeros(4, 8),)), space_of(4)
    graph = ShardingGraph(Stretch.of(planner.forward), space)
    allowed = graph.everything()
    for place, (operator, label) in enumerate(zip(graph.stretch.operators, ["j", "b", "k", "-"], strict=True)):
        choices = graph.space.choices(operator)
        wanted = [at for at, choice in enumerate(choices) if place in (0, 2) and choice.axes == (label,)]
        for choice in wanted:
            allowed = graph.narrowed(allowed, place, choice, is_taken=True)
    sharded = graph.least(allowed=allowed)
    assert PARTIAL in sharded.choices[2].outputs[0].value
    plan = planner.plan(space, sharded)
    assert core_of(plan).segments([True] * 4) == [0, 3]
    assert plan.stages[0].programs[0].segments == (0, 3)


def test_what_was_not_found_so_is_refused() -> None:
    planner, space = Planner.of(*small("gpt")), space_of(4)
    graph = ShardingGraph(Stretch.of(planner.forward), space)
    sharded = any_sharding(graph, Random(0))
    plan = planner.plan(space, sharded)
    (stage,), refused = plan.stages, 0
    (program, *_) = stage.programs
    for number, operator in enumerate(program.operators):
        (result, *others) = operator.results
        if PARTIAL in result.state:
            continue
        wrong = dataclasses.replace(operator, results=(dataclasses.replace(result, state=(PARTIAL,)), *others))
        changed = program.operators[:number] + (wrong,) + program.operators[number + 1 :]
        with pytest.raises(ValueError, match=operator.name.replace(".", r"\.")):
            check_programs(changed_to(plan, dataclasses.replace(program, operators=changed)))
        refused += 1
    assert refused > 20


def changed_to(plan: ParallelPlan, program: PlannedProgram) -> ParallelPlan:
    (stage,) = plan.stages
    others = stage.programs[1:]
    return dataclasses.replace(plan, stages=(dataclasses.replace(stage, programs=(program, *others)),))


def test_a_fault_of_the_search_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, space = Planner.of(*small("gpt")), space_of(4)
    sharded = any_sharding(ShardingGraph(Stretch.of(planner.forward), space), Random(0))

    def without_last(*args: Any) -> ParallelPlan:
        plan = with_programs(*args)
        program = plan.stages[0].programs[0]
        return changed_to(plan, dataclasses.replace(program, operators=program.operators[:-1]))

    monkeypatch.setattr(assembly, "with_programs", without_last)
    with pytest.raises(RuntimeError, match="a fault of the search: .*what leaves: value .* is read before it is made"):
        planner.plan(space, sharded)


def test_what_is_written_again_of_a_table_is_the_same() -> None:
    """A plan of version 1 has tables alone: what is written of these is what a plan of version 2 says."""
    planner, space = Planner.of(*small("tied gpt")), space_of(2, 2)
    for seed in range(8):
        graph = ShardingGraph(Stretch.of(planner.forward), space, zero=seed % 4)
        sharded = any_sharding(graph, Random(seed))
        plan = planner.plan(space, sharded)
        bare = planned_stage(planner.layers, planner.stage(space, sharded), 1, plan.stages[0].peak_bytes)
        assert not bare.programs
        again = with_programs(dataclasses.replace(plan, stages=(bare,)), planner.modes, None)
        assert again.stages[0].programs == plan.stages[0].programs
        assert again.stages[0].parameters == plan.stages[0].parameters
