"""How the ranks of a pipeline build their places in it, together and step by step: see :func:`build_place`."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from torch_xmesh import _C
from torch_xmesh.pipeline.capture.library_models import own_init_fn
from torch_xmesh.pipeline.cut.partition import Partition
from torch_xmesh.pipeline.engine.auto import AutoSchedule, first_schedule
from torch_xmesh.pipeline.engine.boundary import Boundaries, Edge, Placed, edges_of, segment_edges
from torch_xmesh.pipeline.engine.building_agreement import compare_losses, model_fields, options_fields
from torch_xmesh.pipeline.engine.outputs import BufferSync
from torch_xmesh.pipeline.engine.own_stages import OwnStages
from torch_xmesh.pipeline.engine.place import EnginePlace
from torch_xmesh.pipeline.engine.setup import LOOKAHEAD, PlaceOptions, check_options, schedule_of
from torch_xmesh.pipeline.engine.stage import StageForward, StageWork
from torch_xmesh.pipeline.engine.way_comparison import WayComparison
from torch_xmesh.pipeline.ranks.stage_device import on_devices
from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.pipeline.schedule.schedule import Schedule
from torch_xmesh.pipeline.stages.source import StageRequest, StageSource
from torch_xmesh.pipeline.state.checkpoint import state_names
from torch_xmesh.pipeline.state.fully_sharded import FullySharded
from torch_xmesh.pipeline.state.gradient_sync import GradientSync, Tied, check_ties, plain_name, ties_of
from torch_xmesh.pipeline.state.init_sync import (
    check_option,
    copies_of_parts,
    copies_on_mesh,
    make_equal,
    make_ties_equal,
)
from torch_xmesh.pipeline.state.materialize import InitFn, is_unset, materialize
from torch_xmesh.plan_cache import PlanOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """What a user gave: where stages come from, and on which meshes they are."""

    source: StageSource
    meshes: Sequence[StageMesh]
    places: list[int]
    """By stage, its place in the schedule."""
    options: PlaceOptions

    @property
    def init_fn(self) -> InitFn | None:
        """What initializes a module that was on meta, None for its ``reset_parameters``."""
        return self.options.init_fn or own_init_fn(self.source.model)


def build_place(given: Given, transfers: Transfers) -> EnginePlace:
    """Called by every rank of the meshes; those that disagree get a ValueError, all of them.

    Four times all of them meet: over what recordings compute that are there already, over what they were given, over
    the model as it was cut, and at the end.
    """
    options, meshes, source = given.options, given.meshes, given.source
    WayComparison(transfers, source.ways).compare()
    plan_options = PlanOptions.of(options.strategy, options.topology)
    schedule, auto = _agree_on_options(given, transfers, plan_options)
    of_model = set[str]() if source.model is None else state_names(source.model)
    partition = source.partition(
        StageRequest(
            transfers=transfers,
            meshes=meshes,
            chunk_specs=options.chunk_specs,
            is_mean=options.scale_grads,
            memory_limit_bytes=options.memory_limit_bytes,
            is_auto=auto is not None,
            in_flight=schedule.peak_in_flight,
        )
    )
    held = {stage: partition.stages[stage].module for stage, mesh in enumerate(meshes) if transfers.rank in mesh.ranks}
    meshes = on_devices(transfers, meshes, held)
    given = dataclasses.replace(given, meshes=meshes)
    for stage in held:
        partition.stages[stage].on_device(meshes[stage].device)
    boundaries = _agree_on_model(given, transfers, partition, schedule, plan_options)
    ways = WayComparison(transfers, partition.ways)
    ways.compare()
    live = source.live(partition)
    made = _make_stages(given, transfers, partition, boundaries)
    for stage, module in made.modules.items():
        if live is not None:
            live.watch_stand_ins(stage, module)
    partition.keep(made.stages)
    edges = [edge for edge in boundaries.edges if edge.from_stage in made.stages or edge.to_stage in made.stages]
    forward = StageForward(made.works, partition.units, source)
    tied = _tied_parameters(given, transfers.rank, partition, made.named)
    own = OwnStages(
        transfers.rank,
        meshes,
        made.modules,
        named=made.named,
        tied=tied,
        names_stages=source.names_stages,
        unused=made.unused,
        unset=made.unset,
        model_names=frozenset(of_model),
    )
    sharded = FullySharded(transfers, made.modules, meshes)
    by_name = {stage: dict(sorted(named.items())) for stage, named in made.named.items()}
    refused = _frozen_for_good(made.named, partition)
    sync = GradientSync(transfers, by_name, meshes=meshes, tied=tied, summed=sharded.parameters, refused=refused)
    make_ties_equal(transfers, sync, options.init_sync)
    place = EnginePlace(
        transfers=transfers,
        meshes=list(meshes),
        loss_fn=options.loss_fn,
        scale_grads=options.scale_grads,
        chunk_specs=options.chunk_specs,
        overlap=options.overlap,
        schedule=schedule,
        early_weights=options.early_weights,
        auto=auto,
        partition=partition,
        boundaries=boundaries,
        ways=ways,
        index=given.places[made.stages[0]],
        stages=made.stages,
        works=made.works,
        named=made.named,
        live=live,
        unset=made.unset,
        edges=edges,
        forward=forward,
        core=_make_core(made.stages, edges, transfers, boundaries, partition, options.overlap),
        own=own,
        sharded=sharded,
        source=source,
        sync=sync,
        buffers=BufferSync(transfers, made.modules, meshes),
    )
    source.release()
    transfers.traffic.meet([])  # every rank has made its place
    return place


def _agree_on_options(
    given: Given, transfers: Transfers, plan_options: PlanOptions
) -> tuple[Schedule, AutoSchedule | None]:
    """The schedule to begin with, and who chooses another: all ranks were given the same."""
    options, places = given.options, given.places
    given.source.check()
    check_options(options)
    number = None if isinstance(options.num_microbatches, str) else options.num_microbatches
    first_number = number or 2 * (max(places) + 1)
    auto = None
    if options.schedule == "auto":
        auto = AutoSchedule(places, number, options.memory_limit_bytes, options.early_weights)
        schedule = first_schedule(places, first_number, options.memory_limit_bytes)
    else:
        schedule = schedule_of(options.schedule, places, first_number)
    transfers.traffic.meet(
        options_fields(given.meshes, schedule, source=given.source, options=options, plan=plan_options)
    )
    compare_losses(transfers, given.meshes[-1], options.loss_fn)
    transfers.plans.topology(transfers.ranks, plan_options.topology)  # it knows all ranks
    return schedule, auto


def _agree_on_model(
    given: Given, transfers: Transfers, cut: Partition, schedule: Schedule, plan_options: PlanOptions
) -> Boundaries:
    """Where values cross between stages: all ranks have the same model, cut alike, and the schedule fits it."""
    for name, stage in cut.changed_parameters.items():
        if (num_shards := given.meshes[stage].num_shards) > 1:
            raise ValueError(
                f"the forward writes to parameter {name}, in stage {stage}, which runs on {num_shards} data shards: "
                "each would write other values; give the stage a mesh without a data axis (data_axis=None)"
            )
    placed = _checked(given.options.boundary_placements, cut)
    boundaries = Boundaries(edges_of(cut.values), given.meshes, placed, plan_options, given.source.placements)
    _check_segments(schedule, cut)
    schedule.validate([(edge.from_stage, edge.to_stage) for edge in boundaries.edges])
    transfers.traffic.meet(model_fields(cut, boundaries, given.source.model))
    return boundaries


def _check_segments(schedule: Schedule, cut: Partition) -> None:
    """Raises ValueError for an order of other segments than the stages have."""
    found = [stage.num_segments for stage in cut.stages]
    if max(schedule.num_segments) > 1 and list(schedule.num_segments) != found:
        raise ValueError(
            f"the schedule is an order of segments, {list(schedule.num_segments)} by stage; the stages have {found}: "
            "stages of a plan are divided into segments, others have one each"
        )


def _checked(placed: Mapping[str, Placed] | None, cut: Partition) -> Mapping[str, Placed]:
    crossing = [name for name, info in cut.values.items() if info.producer is not None and info.consumers]
    for name in placed or {}:
        if name not in crossing:
            raise ValueError(f"boundary_placements names value {name!r}; the values that cross stages are {crossing}")
    return placed or {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Made:
    """The stages of this rank, with values where they have any."""

    stages: list[int]
    modules: dict[int, nn.Module]
    works: dict[int, StageWork]
    named: dict[int, dict[str, nn.Parameter]]
    unused: dict[str, tuple[nn.Parameter, StageMesh]]
    unset: dict[str, torch.Tensor]


def _make_stages(given: Given, transfers: Transfers, cut: Partition, boundaries: Boundaries) -> _Made:
    """Makes this rank's modules real, parallel, and equal to those of other ranks where they are copies."""
    options, meshes, rank = given.options, given.meshes, transfers.rank
    stages = [stage for stage, mesh in enumerate(meshes) if rank in mesh.ranks]
    unset: dict[str, torch.Tensor] = {}
    unused = _unused_parameters(given, rank, cut, stages, unset)
    check_option(options.init_sync)
    modules = {stage: cut.stages[stage].module for stage in stages}
    if given.source.model is not None:
        before = [copy for stage, module in modules.items() for copy in copies_on_mesh(stage, module, meshes[stage])]
        make_equal(transfers, before, options.init_sync)
    ties = ties_of(modules)
    for stage, module in modules.items():
        if options.parallelize is not None:
            made = options.parallelize(stage, module, meshes[stage].device_mesh)
            if not isinstance(made, nn.Module):
                raise ValueError(f"parallelize must return a module, got {type(made).__name__} for stage {stage}")
            modules[stage] = cut.stages[stage].module = made
    devices = {stage: meshes[stage].device for stage in stages}
    unset.update(materialize(modules, given.init_fn, devices=devices, seed=options.seed, rank=rank))
    works = {
        stage: StageWork(
            cut,
            stage,
            mesh=meshes[stage],
            boundaries=boundaries,
            loss_fn=options.loss_fn,
            seed=options.seed,
            scale_grads=options.scale_grads,
            num_parts=_parts_of_loss(given, stage),
        )
        for stage in stages
    }
    named = {
        stage: {plain_name(name): parameter for name, parameter in module.named_parameters()}
        for stage, module in modules.items()
    }
    check_ties(ties, modules)
    # Without parallelize a stage is equal on its whole mesh: again, for what was on meta till now.
    is_whole = options.parallelize is None and given.source.model is not None
    find = copies_on_mesh if is_whole else copies_of_parts
    parts = [copy for stage, module in modules.items() for copy in find(stage, module, meshes[stage])]
    make_equal(transfers, parts, options.init_sync)
    return _Made(stages=stages, modules=modules, works=works, named=named, unused=unused, unset=unset)


def _parts_of_loss(given: Given, stage: int) -> int:
    shares = given.source.loss_shares(stage)
    return 1 if shares is None else shares.number


def _unused_parameters(
    given: Given, rank: int, cut: Partition, stages: Sequence[int], unset: dict[str, torch.Tensor]
) -> dict[str, tuple[nn.Parameter, StageMesh]]:
    """Parameters of the model that no stage has: stage 0 keeps them, for checkpoints. Adds to `unset` those without
    values."""
    model = given.source.model
    if 0 not in stages or model is None:
        return {}
    names = cut.unused_parameters
    was_meta = {name: model.get_parameter(name).is_meta for name in names}
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
    init_fn, seed = given.init_fn, given.options.seed
    for module in owners.values():
        materialize({0: module}, init_fn, devices={0: given.meshes[0].device}, seed=seed, rank=rank)
    found = {name: (model.get_parameter(name), given.meshes[0]) for name in names}
    unset.update((name, parameter) for name, (parameter, _) in found.items() if was_meta[name] and is_unset(parameter))
    return found


def _make_core(
    stages: Sequence[int],
    edges: Sequence[Edge],
    transfers: Transfers,
    boundaries: Boundaries,
    cut: Partition,
    overlap: bool,
) -> "_C.PipelinePlace":
    units = cut.units
    values = []
    for unit, stage, place in units.of_stages(stages):
        program, is_alone = cut.stages[stage], len(boundaries.meshes[stage].ranks) == 1
        segment = None if program.segments is None else program.segments.segments[place]
        inputs = program.input_values if segment is None else segment.inputs
        outputs = program.output_values if segment is None else segment.outputs
        whole = program if segment is None else segment
        if segment is None:
            positions = [program.input_values.index(name) for name in program.model_inputs]
        else:
            positions = list(range(len(segment.model_inputs)))
        values.append(
            _C.StageValues(
                unit,
                list(inputs),
                list(outputs),
                positions,
                is_alone=is_alone,
                whole_because=whole.whole_because,
                device=boundaries.meshes[stage].device,
                waits_in_weights=whole.waits_in_weights,
                weights_group=0 if segment is None else 1 + unit,  # each segment has accumulators of its own
            )
        )
    edge_values = []
    for edge in edges:
        program = cut.stages[edge.to_stage]
        inputs = program.input_values if program.segments is None else program.segments.segments[0].inputs
        made = boundaries.edge_values(edge, cut.stages[edge.from_stage].output_values, inputs)
        made.from_stage, made.to_stage = units.of(edge.from_stage)[-1], units.of(edge.to_stage)[0]
        edge_values.append(made)
    for stage in stages:
        edge_values += segment_edges(cut.stages[stage], units.of(stage)[0])
    return _C.PipelinePlace(transfers.traffic, values, edge_values, units.counts, overlap, LOOKAHEAD)


def _tied_parameters(
    given: Given, rank: int, cut: Partition, named: Mapping[int, Mapping[str, nn.Parameter]]
) -> list[Tied]:
    """Parameters that stages on other ranks share. Raises ValueError for stages that share some of their ranks."""
    meshes = given.meshes
    tied = []
    for group in cut.tied_parameters:
        by_ranks: dict[frozenset[int], tuple[int, str]] = {}
        for stage, name in group:
            by_ranks.setdefault(frozenset(meshes[stage].ranks), (stage, name))
        stage, name = group[0]
        full = f"{stage}.{name}" if given.source.names_stages else name
        held = sorted(by_ranks.values())
        for (first, _), (other, _) in itertools.combinations(held, 2):
            if shared := set(meshes[first].ranks) & set(meshes[other].ranks):
                raise ValueError(
                    f"stages {first} and {other} share parameter {full}, and rank {min(shared)}, but not all ranks: "
                    "a tied parameter needs stages on the same ranks or on disjoint ones"
                )
        mine = next((held_stage for ranks, held_stage in by_ranks.items() if rank in ranks), None)
        parameter = None if mine is None else named[mine[0]].get(mine[1])
        if len(held) > 1:
            tied.append(Tied(full, tuple((k, meshes[k]) for k, _ in held), parameter))
    return tied


def _frozen_for_good(named: Mapping[int, Mapping[str, nn.Parameter]], partition: Partition) -> dict[nn.Parameter, str]:
    """Parameters of stages that were all frozen, whose values the next stages send no gradients for; and why they
    cannot be trained."""
    out: dict[nn.Parameter, str] = {}
    for stage, own in named.items():
        sent = [info for info in partition.values.values() if info.producer == stage and set(info.consumers) - {stage}]
        if sent and not any(info.requires_grad for info in sent) and not any(p.requires_grad for p in own.values()):
            for name, parameter in own.items():
                out[parameter] = (
                    f"{name} was unfrozen, but all of stage {stage} was frozen when the engine was made: no gradients "
                    "come back to it. Make another engine, and load engine.state_dict() into it"
                )
    return out
