"""PipelineEngine: a model's stages, each on a mesh of its own, run by a schedule."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from torch_xmesh import _C
from torch_xmesh.errors import PeerError, StageError
from torch_xmesh.group import reshards_of
from torch_xmesh.pipeline.boundary import (
    DEFAULT_AXIS,
    Boundaries,
    Placed,
    Transfers,
    edges_of,
    mesh_for_dtensor,
    places_of,
    stage_mesh,
)
from torch_xmesh.pipeline.data_parallel import GradientSync, Tied, check_ties, plain_name, ties_of
from torch_xmesh.pipeline.engine_batch import (
    local_microbatches,
    microbatch_columns,
    model_inputs,
    num_samples,
    specs_of,
)
from torch_xmesh.pipeline.engine_setup import describe_moves, describe_values, digest, next_name, schedule_of
from torch_xmesh.pipeline.engine_stage import StageForward, StageWork, StepState
from torch_xmesh.pipeline.engine_told import told_by, told_by_shards
from torch_xmesh.pipeline.microbatch import microbatch_sizes
from torch_xmesh.pipeline.outputs import BufferSync, whole_outputs
from torch_xmesh.pipeline.partition import Partition, SplitAt, partition
from torch_xmesh.pipeline.profile import choose_split
from torch_xmesh.pipeline.schedule import Schedule
from torch_xmesh.pipeline.state import (
    OwnParameter,
    PipelineScaler,
    clip_gradients,
    is_counted,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
)
from torch_xmesh.pipeline.trace_events import Event, chrome_trace, draw, events_of, table
from torch_xmesh.spec import AnyMesh

_LOOKAHEAD = 4


class PipelineEngine:
    """Trains (or evaluates) a model cut into stages, each on its own mesh. Made by every rank of the meshes alike.

    Args:
        model: the whole model, equal on every rank, or a list of ready stage modules (None where it is another rank's).
        example_args, example_kwargs: one microbatch's arguments; only shapes and dtypes count, meta tensors will do.
        meshes: one mesh per stage; repeat a mesh to put several stages on its ranks.
        split: ``split_at("block.3", ...)`` (a stage starts BEFORE each), ``"auto"`` (balances measured time), or None
            with a list.
        schedule: "gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "auto", an ``xm.Schedule``, or a CSV in torch's
            notation.
        num_microbatches: into how many parts a step cuts its batch.
        loss_fn: ``loss_fn(output, target)``, a mean over its samples (or a sum, with ``scale_grads=False``). Needed to
            train.
        parallelize: ``parallelize(stage, module, mesh) -> module``, called for this rank's stages; also the place
            to make a stage of a model on the meta device real.
        data_axis: the mesh axis over which a stage's batch is sharded: a name, an index or None; or a list, one per
            stage. Default: axis 0; with `parallelize` None for meshes of one axis. After a step all data shards have
            the buffers (batch norm's statistics) of the first one.
        boundary_placements: value name -> (placements, as_dtensor) where a value lies otherwise than by default
            (samples sharded over the data axis, else replicated), or a stage shall see it as a DTensor.
        memory_limit_bytes: per stage, for ``split="auto"``.
        args_chunk_spec, kwargs_chunk_spec, target_chunk_spec, output_merge_spec: as in torch.distributed.pipelining.
        seed: of dropout.
        group: a process group on xmesh with all ranks of the meshes.
        overlap: False sends and receives only while nothing is computed (for comparison).

    Raises:
        ValueError: on every rank, for a mistake in the arguments or ranks that disagree.
        PeerError: a rank is lost or did not come within the group's timeout.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module | None],
        example_args: Sequence[Any] = (),
        example_kwargs: Mapping[str, Any] | None = None,
        *,
        meshes: Sequence[AnyMesh],
        split: SplitAt | str | None = None,
        schedule: str | Schedule = "auto",
        num_microbatches: int,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        parallelize: Callable[[int, nn.Module, Any], nn.Module] | None = None,
        data_axis: Any = DEFAULT_AXIS,
        boundary_placements: Mapping[str, Placed] | None = None,
        scale_grads: bool = True,
        memory_limit_bytes: int | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        target_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        overlap: bool = True,
    ) -> None:
        self._reshards = reshards_of(group)
        rank = self._reshards.core.global_rank
        if not meshes:
            raise ValueError("a pipeline has at least one stage: meshes is empty")
        axes = list(data_axis) if isinstance(data_axis, list | tuple) else [data_axis] * len(meshes)
        if len(axes) != len(meshes):
            raise ValueError(f"data_axis has {len(axes)} entries for {len(meshes)} meshes")
        self._meshes = [
            stage_mesh(mesh, axis, parallelize is not None, stage, rank)
            for stage, (mesh, axis) in enumerate(zip(meshes, axes, strict=True))
        ]
        places = places_of(self._meshes)
        ranks = sorted({r for mesh in self._meshes for r in mesh.ranks})
        if strangers := [r for r in ranks if r not in self._reshards.ranks]:
            raise ValueError(
                f"rank {strangers[0]} of a mesh is not in the group, which has {len(self._reshards.ranks)} ranks"
            )
        if rank not in ranks:
            raise ValueError(f"rank {rank} is on no stage's mesh: only ranks {ranks} make this pipeline")
        self._num_microbatches = num_microbatches
        self._loss_fn = loss_fn
        self._scale_grads = scale_grads
        self._specs = {"args": args_chunk_spec, "kwargs": kwargs_chunk_spec, "target": target_chunk_spec}
        self._merge_spec = output_merge_spec
        self._transfers = Transfers(self._reshards, ranks, next_name(self._reshards, ranks))
        self._is_closed = False
        self._is_sync = True
        self._step = 0
        self._loss: float | None = None
        self._scaler: PipelineScaler | None = None
        self._model_names: set[str] | None = set(model.state_dict()) if isinstance(model, nn.Module) else None
        self._plans: dict[tuple[int, ...], list[_C.EdgePlans]] = {}
        try:
            self._partition = self._cut(model, example_args, example_kwargs, split, memory_limit_bytes)
            self._schedule = schedule_of(schedule, places, num_microbatches)
            self._boundaries = Boundaries(
                edges_of(self._partition.values), self._meshes, self._checked(boundary_placements)
            )
            edges = [(edge.from_stage, edge.to_stage) for edge in self._boundaries.edges]
            self._schedule.validate(edges)
            self._place = places[next(k for k, mesh in enumerate(self._meshes) if rank in mesh.ranks)]
            self._stages = [k for k, place in enumerate(places) if place == self._place]
            self._prepare_stages(parallelize, seed)
            self._core = self._make_place(overlap)
            self._tied = self._tied_parameters(places)
            own = {stage: list(parameters.values()) for stage, parameters in self._named.items()}
            self._sync = GradientSync(self._transfers, own, self._meshes, self._tied)
            modules = {stage: work.program.module for stage, work in self._works.items()}
            self._buffers = BufferSync(self._transfers, modules, self._meshes)
            self._meet(overlap, seed)
            self._leader = self._find_leader()
            self._facts = told_by(self._transfers, "step", self._leader, 3)
            self._shared_losses = told_by_shards(self._transfers, "losses", self._meshes[-1], num_microbatches + 1)
        except BaseException as error:
            self._abandon(error)
            raise

    # What is made once.

    def _cut(self, model: Any, args: Any, kwargs: Any, split: Any, memory_limit_bytes: int | None) -> Partition:
        num_stages = len(self._meshes)
        specs = {"args_chunk_spec": self._specs["args"], "kwargs_chunk_spec": self._specs["kwargs"]}
        if isinstance(model, nn.Module) and split == "auto":
            leader = self._transfers.ranks[0]
            chosen: Any = None
            if self._transfers.rank == leader:
                chosen = choose_split(model, args, kwargs, num_stages, memory_limit_bytes=memory_limit_bytes, **specs)
            split = self._transfers.broadcast("split", leader, chosen)

        def exchange(stage: int, signature: Any) -> Any:
            root = self._meshes[stage].ranks[0]
            if self._transfers.rank == root and signature is None:
                raise ValueError(f"stage {stage} is None on rank {root}, which is on its mesh: pass its module there")
            return self._transfers.broadcast(f"signature/{stage}", root, signature)

        self._names_stages = not isinstance(model, nn.Module)
        return partition(
            model,
            args,
            kwargs,
            split,
            num_stages=num_stages,
            exchange=None if isinstance(model, nn.Module) or None not in model else exchange,
            **specs,
        )

    def _checked(self, given: Mapping[str, Placed] | None) -> Mapping[str, Placed]:
        crossing = [
            name for name, info in self._partition.values.items() if info.producer is not None and info.consumers
        ]
        for name in given or {}:
            if name not in crossing:
                raise ValueError(
                    f"boundary_placements names value {name!r}; the values that cross stages are {crossing}"
                )
        return given or {}

    def _prepare_stages(self, parallelize: Any, seed: int) -> None:
        self._works: dict[int, StageWork] = {}
        self._named: dict[int, dict[str, nn.Parameter]] = {}
        ties = ties_of({stage: self._partition.stages[stage].module for stage in self._stages})
        for stage in self._stages:
            program = self._partition.stages[stage]
            if parallelize is not None:
                made = parallelize(stage, program.module, mesh_for_dtensor(self._meshes[stage].mesh))
                if not isinstance(made, nn.Module):
                    raise ValueError(f"parallelize must return a module, got {type(made).__name__} for stage {stage}")
                program.module = made
            self._works[stage] = StageWork(
                self._partition, stage, self._meshes[stage], self._boundaries, self._loss_fn, seed, self._scale_grads
            )
            self._named[stage] = {plain_name(name): one for name, one in program.module.named_parameters()}
            if empty := [name for name, parameter in self._named[stage].items() if parameter.is_meta]:
                raise ValueError(
                    f"stage {stage}'s parameter {empty[0]} is on the meta device: let parallelize= make it real "
                    "(module.to_empty(device='cpu'), then initialise or load_state_dict)"
                )
        check_ties(ties, {stage: self._partition.stages[stage].module for stage in self._stages})

    def _make_place(self, overlap: bool) -> "_C.PipelinePlace":
        stages = []
        for stage in self._stages:
            program = self._partition.stages[stage]
            positions = [program.input_values.index(name) for name in program.model_inputs]
            stages.append(_C.StageLayout(stage, list(program.input_values), list(program.output_values), positions))
        self._edges = [
            edge for edge in self._boundaries.edges if edge.from_stage in self._stages or edge.to_stage in self._stages
        ]
        programs = self._partition.stages
        layouts = [
            self._boundaries.layout(edge, programs[edge.from_stage].output_values, programs[edge.to_stage].input_values)
            for edge in self._edges
        ]
        self._forward = StageForward(self._works)
        return _C.PipelinePlace(self._transfers.traffic, stages, layouts, self._forward, overlap, _LOOKAHEAD)

    def _tied_parameters(self, places: list[int]) -> list[Tied]:
        tied = []
        for group in self._partition.tied_parameters:
            by_place: dict[int, tuple[int, str]] = {}
            for stage, name in group:
                by_place.setdefault(places[stage], (stage, name))
            stage, name = group[0]
            module = self._partition.stages[stage].module
            known = {plain_name(one): p for one, p in module.named_parameters(remove_duplicate=False)}
            original = known.get(name)
            if original is None:
                raise ValueError(f"parallelize renamed {name} of stage {stage}, which is tied to another stage's")
            mine = by_place.get(self._place)
            parameter = None if mine is None else self._named[mine[0]].get(mine[1])
            holders = tuple((k, self._meshes[k]) for k, _ in sorted(by_place.values()))
            if len(holders) > 1 and original.requires_grad:
                tied.append(Tied(name, holders, parameter, tuple(original.shape), original.dtype))
        return tied

    def _meet(self, overlap: bool, seed: int) -> None:
        """Compares what ranks must agree on; a difference is a ValueError on all of them."""
        self._transfers.traffic.meet(
            [
                ("meshes", "; ".join(f"{mesh.grid} data axis {mesh.data_axis}" for mesh in self._meshes)),
                ("number of microbatches", str(self._num_microbatches)),
                ("schedule", f"{self._schedule.name} {digest(self._schedule.to_csv())}"),
                ("partition of the model", digest(describe_values(self._partition))),
                ("boundaries", digest("; ".join(describe_moves(self._boundaries, self._partition)))),
                ("scale_grads, overlap, seed", f"{self._scale_grads}, {overlap}, {seed}"),
                ("loss_fn", "given" if self._loss_fn is not None else "missing"),
            ]
        )

    def _abandon(self, error: BaseException) -> None:
        if isinstance(error, ValueError) and not self._transfers.traffic.has_failed:
            self._transfers.traffic.fail(f"rank {self._transfers.rank} could not make the pipeline: {error}")
        elif not isinstance(error, PeerError | StageError):
            self._transfers.traffic.fail_stage(
                f"rank {self._transfers.rank} could not make the pipeline: {type(error).__name__}: {error}", -1, -1
            )

    # A step.

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        **kwargs: Any,
    ) -> Any:
        """One training step: forward and backward of every microbatch; gradients are added to ``.grad``.

        Args:
            args, kwargs: the batch, on ranks whose stage takes model inputs; a plain tensor is the whole batch,
                a DTensor is sharded already.
            target: on the last stage's ranks.
            losses: a list that gets one detached scalar per microbatch, on the last stage's ranks.
            return_outputs: False saves the memory of the outputs.

        Returns:
            the merged output on the last stage's ranks, None elsewhere.

        Raises:
            ValueError: arguments that do not fit, on every rank. StageError: a stage raised. PeerError: a rank is lost.
            The engine cannot be used after any of them; close it.
        """
        if self._loss_fn is None:
            raise ValueError("loss_fn is missing: an engine made without it can only evaluate()")
        return self._run(args, kwargs, target, losses, return_outputs, is_train=True)

    def evaluate(self, *args: Any, target: Any = None, losses: list[torch.Tensor] | None = None, **kwargs: Any) -> Any:
        """The forwards of a step, without gradients. Everything else as in :meth:`step`; `target` may be missing."""
        return self._run(args, kwargs, target, losses, True, is_train=False)

    def _run(self, args: Any, kwargs: Any, target: Any, losses: Any, return_outputs: bool, is_train: bool) -> Any:
        with self._guarded(), torch.inference_mode(False):
            try:
                return self._run_guarded(args, kwargs, target, losses, return_outputs, is_train)
            finally:
                self._forward.step = None

    def _failure(self, error: BaseException) -> BaseException:
        """Tells the other ranks of a failure that began here, and what this rank raises."""
        traffic, rank = self._transfers.traffic, self._transfers.rank
        if isinstance(error, PeerError | StageError):
            return error
        action = self._core.failed_action
        if action is not None:
            stage, microbatch = action
            where = f"stage {stage} failed on rank {rank} in microbatch {microbatch} of step {self._step}"
            text = f"{where}: {type(error).__name__}: {error}"
            traffic.fail_stage(text, stage, microbatch)
            return StageError(text, stage, microbatch) if isinstance(error, Exception) else error
        if not traffic.has_failed:
            text = f"rank {rank}, step {self._step}: {error}"
            if isinstance(error, ValueError):
                traffic.fail(text)
            else:
                traffic.fail_stage(f"{text} ({type(error).__name__})", -1, -1)
        return error

    def _run_guarded(
        self, args: Any, kwargs: Any, target: Any, losses: Any, return_outputs: bool, is_train: bool
    ) -> Any:
        takes_inputs = any(self._partition.stages[k].model_inputs for k in self._stages)
        is_last = len(self._meshes) - 1 in self._stages
        args, kwargs = (tuple(args), dict(sorted(kwargs.items()))) if takes_inputs else ((), {})
        if is_last and is_train and target is None:
            raise ValueError(
                f"target is missing on rank {self._transfers.rank}, which has the last stage ({len(self._meshes) - 1})"
            )
        target = target if is_last else None
        tree = (args, kwargs)
        specs = []
        if takes_inputs:
            specs = specs_of(args, self._specs["args"], "args") + specs_of(kwargs, self._specs["kwargs"], "kwargs")
        target_specs = specs_of(target, None if target is None else self._specs["target"], "target")
        if takes_inputs and not pytree.tree_leaves(tree):
            stage = next(k for k in self._stages if self._partition.stages[k].model_inputs)
            raise ValueError(
                f"the batch is missing on rank {self._transfers.rank}: its stage {stage} takes "
                f"{list(self._partition.stages[stage].model_inputs)}"
            )
        sizes = self._agree_on_sizes(num_samples(tree, specs), num_samples(target, target_specs), is_train)
        state = self._forward.step = StepState(self._step, sizes, is_train)
        state.keeps_outputs = return_outputs and is_last
        inputs = self._bind(tree, specs, sizes)
        if is_last and target is not None:
            state.targets = local_microbatches(target, target_specs, sizes, self._meshes[-1], "target")
        schedule = self._schedule.core if is_train else self._schedule.core.forwards()
        if is_train and self._sync.is_needed:
            self._sync.begin_step()
        weights = []
        if is_last and is_train:
            scale = 1.0 if self._scaler is None else self._scaler.get_scale()
            weights = [scale * weight for weight in self._works[len(self._meshes) - 1].loss_weights(sizes)]
        with torch.set_grad_enabled(is_train):
            self._core.run(schedule, self._place, self._step, self._plans_for(sizes), inputs, is_train, weights)
        if is_train and self._sync.is_needed:
            self._sync.end_step(self._is_sync)
        self._share_losses(state, is_last, losses, has_losses=is_train or target is not None)
        self._buffers.run()
        output = None
        if state.keeps_outputs:
            output = whole_outputs(
                self._transfers, self._partition, self._meshes, sizes, state.outputs, self._merge_spec
            )
        self._step += 1
        return output

    def _agree_on_sizes(self, samples: int | None, target_samples: int | None, is_train: bool) -> list[int]:
        """Samples per microbatch, told by the leader to all: ranks in the middle see no batch."""
        leader = self._leader
        if samples is not None and target_samples is not None and samples != target_samples:
            raise ValueError(f"the target has {target_samples} samples, the arguments have {samples}")
        mine = target_samples if samples is None else samples
        rank = self._transfers.rank
        if rank == leader and mine is None:
            raise ValueError(
                "the batch has no tensor to cut into microbatches: every argument is constant or replicated"
            )
        facts = [mine or 0, int(is_train), int(self._is_sync)]
        told = self._facts.exchange(torch.tensor(facts) if rank == leader else None).tolist()
        names = (
            "the batch has {} samples",
            "step() (1) or evaluate() (0): {}",
            "gradients are summed in this step (0 in no_sync): {}",
        )
        for name, one, other in zip(names, told, facts, strict=True):
            if one != other and not (name is names[0] and mine is None):
                raise ValueError(f"ranks disagree: {name.format(one)} on rank {leader}, {other} on rank {rank}")
        sizes = microbatch_sizes(told[0], self._num_microbatches)
        self._boundaries.check_samples(sizes[0])
        self._boundaries.check_samples(sizes[-1])
        return sizes

    def _find_leader(self) -> int:
        """The rank that sees the batch, or the target if no batch is cut."""
        for stage, program in enumerate(self._partition.stages):
            if any(self._partition.values[name].batch_dim is not None for name in program.model_inputs):
                return self._meshes[stage].ranks[0]
        return self._meshes[-1].ranks[0]

    def _bind(self, tree: Any, specs: list[Any], sizes: list[int]) -> dict[int, list[list[torch.Tensor]]]:
        """By stage and microbatch, the model's inputs that the stage takes."""
        bound = {}
        for stage in self._stages:
            if self._partition.stages[stage].model_inputs:
                columns, structure = microbatch_columns(tree, specs, sizes, self._meshes[stage], "the batch")
                bound[stage] = model_inputs(self._partition, stage, columns, structure, sizes)
        return bound

    def _plans_for(self, sizes: list[int]) -> list["_C.EdgePlans"]:
        key = tuple(sizes)
        if key not in self._plans:
            plans = []
            for edge in self._edges:
                start, end = self._meshes[edge.from_stage], self._meshes[edge.to_stage]
                lane = f"{edge.from_stage}-{edge.to_stage}"
                if self._boundaries.is_local(edge):
                    plans.append(_C.EdgePlans(lane, edge.text, False, [], []))
                    continue
                forward = [self._transfers.prepare(self._boundaries.moves(edge, n, False)) for n in sizes]
                backward = []
                if edge.has_gradient:
                    backward = [self._transfers.prepare(self._boundaries.moves(edge, n, True)) for n in sizes]
                is_joint = set(start.ranks) == set(end.ranks)
                plans.append(_C.EdgePlans(lane, edge.text, is_joint, forward, backward))
            self._plans[key] = plans
        return self._plans[key]

    # After a step.

    def _share_losses(self, state: StepState, is_last: bool, losses: Any, has_losses: bool) -> None:
        """The global losses of all microbatches, summed over the data shards of the last stage, on every rank."""
        self._loss = None
        mine = None
        if is_last:
            found = [state.losses.get(microbatch) for microbatch in range(self._num_microbatches)]
            shares = [0.0 if loss is None else loss.item() for loss in found]
            mine = torch.tensor([*shares, float(has_losses)], dtype=torch.float64)
        told = self._shared_losses.exchange(mine)
        if told[-1] == 0:
            return
        total = sum(state.sizes)
        weights = [n / total if self._scale_grads else 1.0 for n in state.sizes]
        self._loss = sum(weight * loss for weight, loss in zip(weights, told[:-1].tolist(), strict=True))
        if losses is not None and is_last:
            for microbatch in range(self._num_microbatches):
                own = state.losses.get(microbatch)
                alone = self._meshes[-1].num_shards == 1 and own is not None
                losses.append(own if alone else told[microbatch].to(torch.float32 if own is None else own.dtype))

    def last_loss(self) -> float | None:
        """The last step's loss over the whole batch, on every rank; None before it, and where there was no target."""
        return self._loss

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps inside leave the sum over the data axis (and tied parameters) to the next step outside."""
        before, self._is_sync = self._is_sync, False
        try:
            yield
        finally:
            self._is_sync = before

    # The stages of this rank.

    @property
    def schedule(self) -> Schedule:
        """What runs where in which order; prints as a grid."""
        return self._schedule

    @property
    def partition(self) -> Partition:
        """The model as stages; prints as a table."""
        return self._partition

    @property
    def stages(self) -> list[int]:
        """The stages on this rank."""
        return list(self._stages)

    def stage_module(self, stage: int) -> nn.Module:
        """The module of a stage of this rank. Raises ValueError for another's."""
        if stage not in self._works:
            raise ValueError(f"stage {stage} is not on rank {self._transfers.rank}, which has stages {self._stages}")
        return self._works[stage].program.module

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the model's own names ("0.weight" for stage 0 of a list of modules)."""
        seen: set[int] = set()
        for stage in self._stages:
            for name, parameter in self._named[stage].items():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield (f"{stage}.{name}" if self._names_stages else name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters: what an optimizer is given."""
        for _, parameter in self.named_parameters():
            yield parameter

    def train(self, mode: bool = True) -> "PipelineEngine":
        """Training mode for this rank's stages."""
        for work in self._works.values():
            work.program.module.train(mode)
        return self

    def eval(self) -> "PipelineEngine":
        """Evaluation mode for this rank's stages."""
        return self.train(False)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the gradients of the whole model; shards, replicas and tied copies count once. Called by all ranks.

        Returns:
            the norm before clipping, equal on every rank.
        """
        with self._guarded():
            return clip_gradients(self._transfers, self._own_parameters(), float(max_norm), float(norm_type))

    def scaler(self, scaler: "torch.amp.GradScaler") -> PipelineScaler:
        """Scales the losses of the steps to come; use what this returns in place of `scaler`, on all ranks alike."""
        self._scaler = PipelineScaler(self._transfers, scaler)
        return self._scaler

    def state_dict(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """This rank's stages as DTensors under the model's own names; torch.distributed.checkpoint saves and loads
        them, also into another number of stages or other meshes.

        Returns:
            name -> DTensor; with `optimizer` {"model": ..., "optimizer": {"name/key": value}}.
        """
        model = model_state(self._modules(), self._keeps)
        if optimizer is None:
            return model
        return {"model": model, "optimizer": optimizer_state(optimizer, self._own_parameters())}

    def load_state_dict(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Takes what :meth:`state_dict` gives, filled by torch.distributed.checkpoint, or a model's state dict.

        Raises:
            ValueError: a key is missing or has another shape.
        """
        load_model_state(self._modules(), self._keeps, state if optimizer is None else state["model"])
        if optimizer is not None:
            load_optimizer_state(optimizer, self._own_parameters(), state["optimizer"])

    def trace(self, path: str | Path) -> None:
        """Writes the last step of all ranks as a Chrome trace. Called by all ranks; the first one writes."""
        events = self._events()
        if self._is_first:
            Path(path).write_text(chrome_trace(events))

    def timeline(self, path: str | Path) -> None:
        """Draws the last step of all ranks (format by suffix). Called by all ranks; the first one writes."""
        events = self._events()
        if self._is_first:
            draw(events, Path(path))

    def summary(self) -> str:
        """The last step in a table: what each rank computed and how long it waited. Called by all ranks."""
        return table(self._events())

    @property
    def _is_first(self) -> bool:
        return self._transfers.rank == self._transfers.ranks[0]

    def _events(self) -> list[Event]:
        edges = [(edge.from_stage, edge.to_stage) for edge in self._edges]
        with self._guarded():
            mine = events_of(self._transfers.rank, self._core, edges)
            return [event for events in self._transfers.gather("events", mine) for event in events]

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Around what all ranks do together: a failure of one ends it on all."""
        if self._is_closed:
            raise RuntimeError("the pipeline engine is closed")
        with self._reshards:
            self._transfers.traffic.check()
            try:
                yield
            except BaseException as error:
                raise self._failure(error) from error

    def _modules(self) -> list[tuple[str, nn.Module, Any]]:
        return [
            (f"{stage}." if self._names_stages else "", self.stage_module(stage), self._meshes[stage])
            for stage in self._stages
        ]

    def _keeps(self, name: str) -> bool:
        return self._model_names is None or name in self._model_names

    def _own_parameters(self) -> list[OwnParameter]:
        lent = {id(one.parameter) for one in self._tied if one.holders[0][0] not in self._stages}
        found, seen = [], set()
        for stage in self._stages:
            for name, parameter in self._named[stage].items():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    full = f"{stage}.{name}" if self._names_stages else name
                    counted = id(parameter) not in lent and is_counted(parameter, self._meshes[stage])
                    found.append(OwnParameter(full, parameter, self._meshes[stage], counted))
        return found

    def close(self) -> None:
        """Ends the engine on this rank. Idempotent; the process group stays."""
        if not self._is_closed:
            self._is_closed = True
            self._transfers.traffic.close()

    @property
    def buffer_counts(self) -> tuple[int, int]:
        """Receive buffers allocated so far on this rank: how many, and their bytes. Constant after the second step."""
        return self._core.num_buffers, self._core.buffer_bytes
