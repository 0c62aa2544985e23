"""One rank's place in a pipeline: all that an engine works out once of the model, the meshes and the schedule."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torch_xmesh import _C
from torch_xmesh.pipeline.cut.partition import Partition, SplitAt, partition
from torch_xmesh.pipeline.cut.profile import check_limit, choose_split
from torch_xmesh.pipeline.engine.agreement import (
    compare_losses,
    exchange_of,
    model_fields,
    options_fields,
    with_agreed_ties,
)
from torch_xmesh.pipeline.engine.auto import AutoSchedule, Cuts, StepPlan, first_schedule
from torch_xmesh.pipeline.engine.boundary import Boundaries, Placed, edges_of
from torch_xmesh.pipeline.engine.outputs import BufferSync
from torch_xmesh.pipeline.engine.own_stages import OwnStages
from torch_xmesh.pipeline.engine.setup import LOOKAHEAD, PlaceOptions, check_options, schedule_of
from torch_xmesh.pipeline.engine.stage import StageForward, StageWork
from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.pipeline.ranks.transfers import Transfers
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
from torch_xmesh.spec import device_mesh


class EnginePlace:
    """The stages of one rank, what crosses their boundaries, and the C++ engine that runs them.

    Every rank of the meshes makes it alike; ranks that disagree get a ValueError, all of them.

    Attributes:
        transfers: all that moves between the ranks.
        meshes: of every stage.
        partition, schedule, boundaries: of the whole model; the schedule is that of the last training step, or what was
            chosen after it.
        early_weights: W may run before its turn.
        auto: chooses the schedule after the first training step, or None.
        index: this rank's place in the schedule; `stages` are the place's.
        works, named: by stage of this rank, its work, and its parameters by name.
        edges: those that begin or end here, as `core` counts them.
        own: the stages of this rank as a user sees them.
        unset: tensors of a model on meta that still have no values, by name.
    """

    def __init__(
        self,
        *,
        model: nn.Module | Sequence[nn.Module | None],
        example_args: Sequence[Any],
        example_kwargs: Mapping[str, Any] | None,
        transfers: Transfers,
        meshes: Sequence[StageMesh],
        places: list[int],
        options: PlaceOptions,
    ) -> None:
        self.transfers = transfers
        self.meshes = list(meshes)
        self.loss_fn = options.loss_fn
        self.scale_grads = options.scale_grads
        self.chunk_specs = options.chunk_specs
        self.overlap = options.overlap
        self.early_weights = options.early_weights
        self.names_stages = not isinstance(model, nn.Module)
        rank = transfers.rank
        check_options(model, example_args, example_kwargs, options)
        number = None if isinstance(options.num_microbatches, str) else options.num_microbatches
        first_number = number or 2 * (max(places) + 1)
        self.auto: AutoSchedule | None = None
        if options.schedule == "auto":
            self.auto = AutoSchedule(places, number, options.memory_limit_bytes, options.early_weights)
            self.schedule = first_schedule(places, first_number, options.memory_limit_bytes)
        else:
            self.schedule = schedule_of(options.schedule, places, first_number)
        plan_options = PlanOptions.of(options.strategy, options.topology)
        transfers.traffic.meet(
            options_fields(self.meshes, self.schedule, model=model, options=options, plan_options=plan_options)
        )
        compare_losses(transfers, self.meshes[-1], options.loss_fn)
        transfers.plans.topology(transfers.ranks, plan_options.topology)  # it knows all ranks
        self.partition = self._cut(
            model, example_args, example_kwargs, split=options.split, memory_limit_bytes=options.memory_limit_bytes
        )
        given = self._checked(options.boundary_placements)
        self.boundaries = Boundaries(edges_of(self.partition.values), self.meshes, given, plan_options)
        self.schedule.validate([(edge.from_stage, edge.to_stage) for edge in self.boundaries.edges])
        transfers.traffic.meet(model_fields(self.partition, self.boundaries, model))
        self.index = places[next(k for k, mesh in enumerate(self.meshes) if rank in mesh.ranks)]
        self.stages = [k for k, mesh in enumerate(self.meshes) if rank in mesh.ranks]
        self.unset: dict[str, torch.Tensor] = {}
        unused = self._unused_parameters(model, options.init_fn, options.seed)
        check_option(options.init_sync)
        self._prepare_stages(options)
        self.core = self._make_core(options.overlap)
        tied = self._tied_parameters()
        modules = {stage: work.program.module for stage, work in self.works.items()}
        self.own = OwnStages(
            rank,
            self.meshes,
            modules,
            named=self.named,
            tied=tied,
            names_stages=self.names_stages,
            unused=unused,
            unset=self.unset,
        )
        self.sharded = FullySharded(transfers, modules, self.meshes)
        self.sync = GradientSync(transfers, self.named, meshes=self.meshes, tied=tied, summed=self.sharded.parameters)
        make_ties_equal(transfers, self.sync, options.init_sync)
        self.buffers = BufferSync(transfers, modules, self.meshes)
        transfers.traffic.meet([])  # every rank has made its place

    def numbers(self, batch: tuple[int, int]) -> tuple[int, ...]:
        """Of microbatches, into which a batch of so many samples on so many shards may be cut."""
        samples, shards = batch
        if self.auto is None:
            return (self.schedule.num_microbatches,)
        numbers = self.auto.numbers(samples, max(shards, self.most_shards))
        if len(numbers) > 1 and self.partition.fixed_batch and self.partition.batch_size:
            return (max(1, samples // self.partition.batch_size),)
        return numbers

    def plan(self, cuts: Cuts, *, is_train: bool) -> StepPlan:
        """What a step with such a batch runs. Called by all ranks."""
        if self.auto is None:
            return StepPlan(self.schedule, self.early_weights)
        return self.auto.plan(self, cuts, is_train=is_train)

    @property
    def most_shards(self) -> int:
        """The most data shards of any stage."""
        return max(mesh.num_shards for mesh in self.meshes)

    @property
    def has_last(self) -> bool:
        """Whether the last stage is here."""
        return len(self.meshes) - 1 in self.stages

    def _cut(
        self, model: Any, args: Any, kwargs: Any, *, split: SplitAt | str | None, memory_limit_bytes: int | None
    ) -> Partition:
        check_limit(split, memory_limit_bytes if self.auto is None else None)
        num_stages = len(self.meshes)
        specs = {"args_chunk_spec": self.chunk_specs["args"], "kwargs_chunk_spec": self.chunk_specs["kwargs"]}
        if isinstance(model, nn.Module) and split == "auto":
            leader = self.transfers.ranks[0]
            chosen: Any = None
            if self.transfers.rank == leader:
                chosen = choose_split(
                    model,
                    args,
                    kwargs,
                    num_stages,
                    memory_limit_bytes=memory_limit_bytes,
                    microbatches_in_flight=self.schedule.peak_in_flight,
                    **specs,
                )
            split = self.transfers.broadcast("split", leader, chosen)

        cut = partition(
            model,
            args,
            kwargs,
            split,
            num_stages=num_stages,
            exchange=None if isinstance(model, nn.Module) else exchange_of(self.transfers, self.meshes),
            **specs,
        )
        return with_agreed_ties(cut, self.transfers, self.meshes)

    def _unused_parameters(
        self, model: Any, init_fn: InitFn | None, seed: int
    ) -> dict[str, tuple[nn.Parameter, StageMesh]]:
        names = self.partition.unused_parameters if 0 in self.stages else ()
        was_meta = {name: model.get_parameter(name).is_meta for name in names}
        owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
        for module in owners.values():
            materialize({0: module}, init_fn, device=torch.device("cpu"), seed=seed, rank=self.transfers.rank)
        found = {name: (model.get_parameter(name), self.meshes[0]) for name in names}
        self.unset.update((name, one) for name, (one, _) in found.items() if was_meta[name] and is_unset(one))
        return found

    def _checked(self, given: Mapping[str, Placed] | None) -> Mapping[str, Placed]:
        crossing = [
            name for name, info in self.partition.values.items() if info.producer is not None and info.consumers
        ]
        for name in given or {}:
            if name not in crossing:
                raise ValueError(
                    f"boundary_placements names value {name!r}; the values that cross stages are {crossing}"
                )
        return given or {}

    def _prepare_stages(self, options: PlaceOptions) -> None:
        parallelize = options.parallelize
        modules = {stage: self.partition.stages[stage].module for stage in self.stages}
        if not self.names_stages:
            before = [c for stage, module in modules.items() for c in copies_on_mesh(stage, module, self.meshes[stage])]
            make_equal(self.transfers, before, options.init_sync)
        ties = ties_of(modules)
        for stage, module in modules.items():
            if parallelize is not None:
                made = parallelize(stage, module, device_mesh(self.meshes[stage].mesh))
                if not isinstance(made, nn.Module):
                    raise ValueError(f"parallelize must return a module, got {type(made).__name__} for stage {stage}")
                modules[stage] = self.partition.stages[stage].module = made
        device = torch.device("cpu")
        self.unset.update(
            materialize(modules, options.init_fn, device=device, seed=options.seed, rank=self.transfers.rank)
        )
        self.works: dict[int, StageWork] = {}
        self.named: dict[int, dict[str, nn.Parameter]] = {}
        for stage, module in modules.items():
            self.works[stage] = StageWork(
                self.partition,
                stage,
                mesh=self.meshes[stage],
                boundaries=self.boundaries,
                loss_fn=self.loss_fn,
                seed=options.seed,
                scale_grads=self.scale_grads,
            )
            self.named[stage] = {plain_name(name): one for name, one in module.named_parameters()}
        check_ties(ties, modules)
        parts = [c for stage, module in modules.items() for c in copies_of_parts(stage, module, self.meshes[stage])]
        if parallelize is None and not self.names_stages:  # equal on its whole mesh; again, what was on meta till now
            parts = [c for stage, module in modules.items() for c in copies_on_mesh(stage, module, self.meshes[stage])]
        make_equal(self.transfers, parts, options.init_sync)

    def _make_core(self, overlap: bool) -> "_C.PipelinePlace":
        stages = []
        for stage in self.stages:
            program = self.partition.stages[stage]
            positions = [program.input_values.index(name) for name in program.model_inputs]
            is_alone = len(self.meshes[stage].ranks) == 1
            inputs, outputs = list(program.input_values), list(program.output_values)
            stages.append(_C.StageValues(stage, inputs, outputs, positions, is_alone))
        self.edges = [
            edge for edge in self.boundaries.edges if edge.from_stage in self.stages or edge.to_stage in self.stages
        ]
        programs = self.partition.stages
        edges = [
            self.boundaries.edge_values(
                edge, programs[edge.from_stage].output_values, programs[edge.to_stage].input_values
            )
            for edge in self.edges
        ]
        self.forward = StageForward(self.works)
        return _C.PipelinePlace(self.transfers.traffic, stages, edges, self.forward, overlap, LOOKAHEAD)

    def _tied_parameters(self) -> list[Tied]:
        tied = []
        for group in self.partition.tied_parameters:
            by_ranks: dict[frozenset[int], tuple[int, str]] = {}
            for stage, name in group:
                by_ranks.setdefault(frozenset(self.meshes[stage].ranks), (stage, name))
            stage, name = group[0]
            full = f"{stage}.{name}" if self.names_stages else name
            held = sorted(by_ranks.values())
            for (one, _), (other, _) in itertools.combinations(held, 2):
                if shared := set(self.meshes[one].ranks) & set(self.meshes[other].ranks):
                    raise ValueError(
                        f"stages {one} and {other} share parameter {full}, and rank {min(shared)}, but not all ranks: "
                        "a tied parameter needs stages on the same ranks or on disjoint ones"
                    )
            mine = next((one for ranks, one in by_ranks.items() if self.transfers.rank in ranks), None)
            parameter = None if mine is None else self.named[mine[0]].get(mine[1])
            if len(held) > 1:
                tied.append(Tied(full, tuple((k, self.meshes[k]) for k, _ in held), parameter))
        return tied
