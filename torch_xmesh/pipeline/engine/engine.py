"""PipelineEngine: a model's stages, each on a mesh of its own, run by a schedule."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from torch_xmesh.arguments import instance_of
from torch_xmesh.errors import PeerError, StageError
from torch_xmesh.group import reshards_of
from torch_xmesh.pipeline.cut.partition import Partition, SplitAt
from torch_xmesh.pipeline.engine.boundary import Placed
from torch_xmesh.pipeline.engine.building import Given, build_place
from torch_xmesh.pipeline.engine.costs import costs_of
from torch_xmesh.pipeline.engine.report import StepReport
from torch_xmesh.pipeline.engine.setup import PlaceOptions
from torch_xmesh.pipeline.engine.step_batch import StepArguments
from torch_xmesh.pipeline.engine.steps import EngineSteps
from torch_xmesh.pipeline.ranks.arrival import abandoning, stage_meshes_of, telling
from torch_xmesh.pipeline.ranks.refused import StepRefusedError
from torch_xmesh.pipeline.ranks.stage_mesh import DEFAULT_AXIS, places_of
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.pipeline.schedule.schedule import Schedule
from torch_xmesh.pipeline.schedule.simulation import Costs, StageCosts
from torch_xmesh.pipeline.stages.sources import Arrangement, source_of
from torch_xmesh.pipeline.state.checkpoint import optimizer_state
from torch_xmesh.pipeline.state.clipping import Clipping, clip_gradients
from torch_xmesh.pipeline.state.init_sync import InitSync
from torch_xmesh.pipeline.state.materialize import InitFn
from torch_xmesh.pipeline.state.training import PipelineScaler
from torch_xmesh.spec import AnyMesh
from torch_xmesh.topology import Topology

if TYPE_CHECKING:
    from torch_xmesh.parallelism.plan import ParallelPlan


class PipelineEngine:
    """Trains (or evaluates) a model cut into stages, each on its own mesh. Made by every rank of the meshes alike; as a
    context manager it closes itself.

    Args:
        model: the whole model, equal on every rank, or a list of ready stage modules (None where it is another rank's;
            a parameter that stages share is tied if every rank of their meshes passes the modules of all of them).
        example_args, example_kwargs: one microbatch's arguments; only shapes and dtypes count, meta tensors will do.
        meshes: one mesh per stage; repeat a mesh to put several stages on its ranks. Meshes may also share some ranks:
            such stages are scheduled as if on one place, and each rank runs its own part of that place's order.
        split: ``split_at("block.3", ...)`` (a stage starts BEFORE each), ``"auto"`` (balances measured time), or None
            with a list.
        schedule: a name, one of ``xm.Schedule.names()``, an ``xm.Schedule``, a CSV in torch's notation, or torch's name
            or class for one of them ("1F1B", ``ScheduleGPipe``); or "auto": the first training step is measured, and
            from the second on runs the one that :func:`choose_schedule` takes for the fastest with the figures of that
            step; later sizes do not change it, if num_microbatches is an int. An order is static but for one thing:
            before it waits for a value, a place runs a W that comes later in its list, where the stage is on one rank,
            or an earlier step with the same sizes and trained parameters has run its W without a collective.
        num_microbatches: into how many parts a step cuts its batch; or, with ``schedule="auto"``, "auto": the first two
            training steps are measured, with microbatches of different sizes, and the number is chosen with the
            schedule, for each size that a batch has. A data shard has two samples or more of each microbatch, if the
            batch has as many.
        plan: an ``xm.ParallelPlan`` for the whole model and its example, in place of meshes, split, schedule, number of
            microbatches, data_axis, parallelize and boundary_placements. Stages run on each device's parts; every rank
            passes the same model, of which it keeps its parts as DTensors.
        loss_fn: ``loss_fn(output, target)``, or ``loss_fn(output)`` where the model computes the loss, a mean over its
            samples (or a sum, with ``scale_grads=False``), of shape []. Needed to train.
        parallelize: ``parallelize(stage, module, mesh) -> module``, called for this rank's stages; also the place
            to make a stage of a model on the meta device real. ``fully_shard`` (FSDP2) may be called there, over the
            whole data axis or over others: gradients are reduced once, at the end of a step, to the sums that plain
            parameters get; with ``reshard_after_forward=False`` parameters stay gathered from a step's first use of
            them to its end. Inside no_sync() FSDP2 keeps what it has not reduced to itself: ``.grad`` does not show it,
            and zero_grad() does not drop it.
        data_axis: the mesh axis over which a stage's batch is sharded: a name, an index, None, or a tuple of axes that
            together are one (for ``fully_shard`` on two axes, which replicates over the first); or a list, one per
            stage. Default: axis 0; with `parallelize` None for meshes of one axis. After a step all data shards have
            the buffers (batch norm's statistics) of the first one.
        boundary_placements: value name -> (placements, as_dtensor) where a value lies otherwise than by default
            (samples sharded over the data axis, else replicated), or a stage shall see it as a DTensor.
        scale_grads: True weights each microbatch's loss by its part of the batch's samples, so that a step's loss and
            gradients are those of a mean over the whole batch; False adds the losses up as they are.
        memory_limit_bytes: for ``schedule="auto"``: what the stages of no place may hold together; if no schedule keeps
            it, the step after the measured ones is a ValueError that names the smallest limit that one would. And for
            ``split="auto"``: what no stage may exceed; ValueError if no split keeps it. It counts parameters with
            gradients and two optimizer states, and what a stage receives and autograd keeps of as many microbatches as
            the schedule has in flight there; in ``split="auto"`` all before `parallelize` and `data_axis` share it out
            over ranks, and stages on the same ranks have the limit each.
        args_chunk_spec, kwargs_chunk_spec, target_chunk_spec, output_merge_spec: as in torch.distributed.pipelining.
            Without output_merge_spec a tensor without dims in the output, such as a loss, comes as one entry per
            microbatch.
        seed: an int, of dropout: masks follow from it, the step, the stage, the microbatch and the data shard.
        group: a process group on xmesh with all ranks of the meshes; None is the default group.
        overlap: False computes on only when what an action made has left (for comparison); receives stay posted ahead.
        early_weights: False keeps every W to its place in the order; see `schedule`, which may choose it too.
        compare_batches: False does not compare the plain tensors that several ranks pass, nor the first and the last
            stage's targets.
        init_sync: True gives all replicas, shards and tied copies of a parameter or buffer the values of the first rank
            that has it, as DistributedDataParallel does; "check" raises ValueError where they differ; False trusts.
        init_fn: ``init_fn(module)`` for each module with parameters or buffers on the meta device, once `parallelize`
            has been called and they have memory on this rank's device; default: ``module.reset_parameters()``, for a
            model of transformers its own ``_init_weights(module)``. What
            neither sets, load_state_dict() must set before the first step.
        strategy, topology: how what crosses from mesh to mesh is resharded, as in :func:`reshard`; a calibrated
            topology's link speeds choose better and pace the sends.

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
        meshes: Sequence[AnyMesh] | None = None,
        split: SplitAt | str | None = None,
        schedule: str | Schedule | type[Any] = "auto",
        num_microbatches: int | str | None = None,
        plan: "ParallelPlan | None" = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
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
        early_weights: bool = True,
        compare_batches: bool = True,
        init_sync: InitSync = True,
        init_fn: InitFn | None = None,
        strategy: object = "auto",
        topology: Topology | None = None,
    ) -> None:
        self._reshards = reshards_of(group)
        self._is_closed = False
        self._ended: BaseException | None = None  # by this; see _guarded
        with telling(self._reshards, meshes):
            arrangement = Arrangement(
                meshes=meshes,
                schedule=schedule,
                num_microbatches=num_microbatches,
                data_axis=data_axis,
                others={"parallelize": parallelize, "boundary_placements": boundary_placements, "group": group},
            )
            source, arrangement = source_of(
                model, example_args, example_kwargs, split=split, plan=plan, arrangement=arrangement
            )
            if arrangement.num_microbatches is None:
                raise ValueError("num_microbatches is missing")
            stages, ranks = stage_meshes_of(
                self._reshards, arrangement.meshes, arrangement.data_axis, parallelize is not None
            )
            places = places_of(stages)
        self._transfers = Transfers(self._reshards, ranks)
        specs = {"args": args_chunk_spec, "kwargs": kwargs_chunk_spec, "target": target_chunk_spec}
        options = PlaceOptions(
            schedule=arrangement.schedule,
            num_microbatches=arrangement.num_microbatches,
            loss_fn=loss_fn,
            parallelize=parallelize,
            boundary_placements=boundary_placements,
            scale_grads=scale_grads,
            memory_limit_bytes=memory_limit_bytes,
            chunk_specs=specs,
            seed=seed,
            overlap=overlap,
            early_weights=early_weights,
            compare_batches=compare_batches,
            init_sync=init_sync,
            init_fn=init_fn,
            strategy=strategy,
            topology=topology,
        )
        with abandoning(self._transfers):
            given = Given(source=source, meshes=stages, places=places, options=options)
            self._place = build_place(given, self._transfers)
            self._steps = EngineSteps(self._place, output_merge_spec, compare_batches)
            self._report = StepReport(self._place, self._steps)

    # A step.

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        sharded: bool = False,
        **kwargs: Any,
    ) -> Any:
        """One training step: forward and backward of every microbatch; gradients are added to ``.grad``.

        Between steps parameters may be frozen and unfrozen, alike on all ranks that hold them, as long as the same
        values between stages carry gradients.

        Args:
            args, kwargs: the batch, on ranks whose stage takes model inputs; a plain tensor is the whole batch,
                the same on all of them (which is checked in the first steps, and when sizes change); a DTensor is
                sharded already, over the stage's data axis. Where one is, each shard is cut into
                microbatches of its own; samples of plain tensors, the target and the output keep to their batch order.
                Sizes may differ from the example's and from step to step (a sequence's length) where the stages work
                for them; what follows from the last 64 combinations of sizes is kept.
            target: on the last stage's ranks; may be missing where loss_fn takes the output alone.
            losses: a list that gets one detached scalar per microbatch, on the last stage's ranks.
            return_outputs: False saves the memory of the outputs.
            sharded: plain tensors, of the batch and the target, are the samples of this rank's data shard, equally many
                on each, as a DistributedSampler gives them. With a plan they are this rank's equal part: the parts of
                a stage's ranks, in the order of ranks, are the batch, and those of the last stage's the target.

        Returns:
            the merged output on the last stage's ranks, None elsewhere.

        Raises:
            ValueError: arguments that do not fit, on every rank; nothing was computed, the next step may do.
            StageError: a stage raised. That ends the engine: each later call raises the same ("this engine ended:
                ..."), or RuntimeError after anything else; make a new one.
            PeerError: a rank is lost, or has closed its engine. That ends this one too.
        """
        if self._place.loss_fn is None:
            raise ValueError("loss_fn is missing: an engine made without it can only evaluate()")
        return self._run(StepArguments(args, kwargs, target, losses, return_outputs, is_train=True, is_sharded=sharded))

    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        sharded: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The forwards of a step, without gradients. Everything else as in :meth:`step`; `target` may be missing."""
        call = StepArguments(args, kwargs, target, losses, return_outputs=True, is_train=False, is_sharded=sharded)
        return self._run(call)

    def _run(self, call: StepArguments) -> Any:
        with self._guarded(), torch.inference_mode(False):
            try:
                return self._steps.run(call)
            finally:
                self._place.forward.step = None

    def _failure(self, error: BaseException) -> BaseException:
        """Tells the other ranks of a failure that began here, and what this rank raises."""
        traffic, rank = self._transfers.traffic, self._transfers.rank
        if isinstance(error, PeerError | StageError):
            if isinstance(error, PeerError) and not traffic.has_failed:  # a rank left in a collective
                traffic.fail_peer(str(error), error.ranks)
            return error
        action = self._place.core.failed_action
        if action is not None:
            stage, microbatch = action
            failed = self._place.core.failed_in
            where = f"{failed} failed on rank {rank} in microbatch {microbatch} of step {self._steps.number}"
            text = f"{where}: {type(error).__name__}: {error}"
            traffic.fail_stage(text, stage, microbatch)
            return StageError(text, stage, microbatch) if isinstance(error, Exception) else error
        if not traffic.has_failed:
            where = f"rank {rank}, step {self._steps.number}"
            if isinstance(error, ValueError):
                traffic.refuse(f"{where}: {error}")
            else:
                traffic.fail_stage(f"{where}: {type(error).__name__}{': ' if str(error) else ''}{error}", -1, -1)
        return error

    def last_loss(self) -> float | None:
        """The loss of the last step, or evaluation, over the whole batch, on every rank; None before it, and where
        there was no target."""
        return self._steps.loss

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context manager. Steps inside leave the sum over the data axis (and tied parameters) to the next step
        outside; until then ``.grad`` has only this rank's part of what they add."""
        before, self._steps.is_sync = self._steps.is_sync, False
        try:
            yield
        finally:
            self._steps.is_sync = before

    # The stages of this rank.

    @property
    def schedule(self) -> Schedule:
        """What runs where in which order; prints as a grid."""
        return self._place.schedule

    @property
    def early_weights(self) -> bool:
        """Whether W may run before their turn; with ``schedule="auto"`` chosen with the schedule."""
        return self._place.early_weights

    @property
    def partition(self) -> Partition:
        """The model as stages; prints as a table."""
        return self._place.partition

    @property
    def stages(self) -> list[int]:
        """The stages on this rank, ascending."""
        return list(self._place.stages)

    def stage_module(self, stage: int) -> nn.Module:
        """The module of a stage of this rank, as `parallelize` has returned it.

        Raises:
            ValueError: the stage is not on this rank.
        """
        return self._place.own.module(stage)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the model's own names ("0.weight" for stage 0 of a list of modules)."""
        return self._place.own.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters: what an optimizer is given. Where its stages have none there is one without entries,
        so that an optimizer can be made there, too."""
        has_any = False
        for _, parameter in self.named_parameters():
            has_any = True
            yield parameter
        if not has_any:
            yield nn.Parameter(torch.zeros(0, device=self._device))

    @property
    def _device(self) -> torch.device:
        """The first of this rank's stages'."""
        return self._place.meshes[self._place.stages[0]].device

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of this rank's parameters, or sets them to zero."""
        for parameter in self.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def train(self, mode: bool = True) -> "PipelineEngine":
        """Training mode for this rank's stages."""
        self._place.own.train(mode)
        if self._place.live is not None:
            self._place.live.told()
        return self

    def eval(self) -> "PipelineEngine":
        """Evaluation mode for this rank's stages."""
        return self.train(False)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clips the gradients of the whole model as ``torch.nn.utils.clip_grad_norm_`` does in one process; shards,
        replicas and tied copies count once. Called by all ranks.

        Args:
            max_norm: the norm that they have afterwards, where theirs was larger.
            norm_type: p of the p-norm: any number, ``float("inf")`` and ``float("-inf")`` too.
            error_if_nonfinite: a norm that is nan or infinite is an error.
            foreach: as torch takes it.

        Returns:
            the norm before clipping, of shape [] and the dtype that all gradients promote to, equal on every rank: nan
            where one gradient has one (but with norm_type=0), 0 without gradients. It is added up in float64.

        Raises:
            ValueError: on all ranks, and gradients stay as they are: an argument is no number, or ranks pass others.
            RuntimeError: the same where `error_if_nonfinite` asks for it.
        """
        clipping: Clipping | None = None
        failure: ValueError | None = None
        try:
            clipping = Clipping(max_norm, norm_type, bool(error_if_nonfinite), foreach)
        except ValueError as error:
            failure = error
        with self._guarded("clip_grad_norm_()", failure):
            assert clipping is not None, "all ranks have refused"
            return clip_gradients(self._transfers, self._place.own.own_parameters(), clipping)

    def scaler(self, scaler: "torch.amp.GradScaler") -> PipelineScaler:
        """Scales the losses of the steps to come; use what this returns in place of `scaler`, on all ranks alike.

        Args:
            scaler: a ``torch.amp.GradScaler`` for the parameters' device, made alike on every rank.

        Raises:
            ValueError: it is none.
        """
        guard = functools.partial(self._guarded, "the scaler's unscale_() or step()")
        devices = [self._place.meshes[stage].device for stage in self._place.stages]
        where = next((device for device in devices if device.type == "cpu"), devices[0])
        self._steps.scaler = PipelineScaler(self._transfers, scaler, guard, where)
        return self._steps.scaler

    def state_dict(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """This rank's stages as DTensors under the model's own names; torch.distributed.checkpoint saves and loads
        them, also into another number of stages or other meshes. Parameters that no stage uses are with the first.

        Returns:
            name -> DTensor; with `optimizer` {"model": ..., "optimizer": {"name/key": value}, "step": n}. The
            optimizer's options (lr, betas, ...) are "name/param_groups.key"; a scheduler adds some, so make it before
            this. n counts the training steps done: dropout goes on from there.

        Called by all ranks. Of an engine that has ended, or that is closed on some rank, any rank has its own part.

        Raises:
            ValueError: a module's own ``state_dict`` leaves a parameter out, or ranks are in different calls.
        """
        if not self._is_closed and self._ended is None:
            with contextlib.suppress(PeerError, StageError), self._guarded("state_dict()"):
                pass
        model = self._place.own.state()
        if optimizer is None:
            return model
        instance_of("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer or None")
        found = optimizer_state(optimizer, self._place.own.own_parameters())
        return {"model": model, "optimizer": found, "step": self._steps.number}

    def load_state_dict(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Takes what :meth:`state_dict` gives, filled by torch.distributed.checkpoint, or a model's state dict.

        With `optimizer`, the steps that follow are bitwise those that would have followed where it was saved, if the
        stages, the meshes and the number of microbatches are the same (``engine.schedule.num_microbatches``, where that
        was "auto").

        Called by all ranks.

        Raises:
            ValueError: on every rank, where on one a key is missing, has another shape, or is no name of the model's;
                nothing has been copied then.
        """
        copies: list[Callable[[], None]] = []
        number, failure = self._steps.number, None
        try:
            copies = self._place.own.load(state, optimizer)
            number = number if optimizer is None else int(state["step"])
        except Exception as error:
            failure = error
        with self._guarded("load_state_dict()", failure):
            self._check_names(state, optimizer is not None)
            for copy in copies:
                copy()
            self._place.own.all_set()
            self._steps.number = number

    def _check_names(self, state: Mapping[str, Any], has_optimizer: bool) -> None:
        """Called by all ranks: one's state may have what another one's stages are called."""
        known = set[str]().union(*self._transfers.gather("names of states", self._place.own.names()))
        found = self._transfers.gather("strange names", self._place.own.strangers(state, has_optimizer, known))
        for rank, text in zip(self._transfers.ranks, found, strict=True):
            if text is not None:
                raise StepRefusedError(ValueError(f"on rank {rank}, {text}"))

    def costs(self, stages: Sequence[StageCosts], *, topology: Topology | None = None) -> Costs:
        """For :func:`simulate` with this engine's schedule: what the stages take, as given (one entry per stage), and
        what a microbatch like the example takes from mesh to mesh, as its plans predict. No other rank is needed.

        Args:
            stages: what F, B, I and W of one microbatch take, in seconds, and hold, in bytes; one entry per stage.
            topology: link speeds, for example a calibrated file's; without it those that the engine was given.
        """
        place = self._place
        return costs_of(self._transfers, place.boundaries, stages=stages, topology=topology, overlap=place.overlap)

    def trace(self, path: str | Path) -> None:
        """Writes the last step of all ranks, on one clock, as a Chrome trace. Called by all ranks; the first one
        writes.

        Raises:
            ValueError: on all ranks, before any step.
            OSError: on all ranks, where it cannot be written.
        """
        with self._guarded("trace()", self._report.refusal(path)):
            self._report.write_trace(Path(path))

    def timeline(self, path: str | Path) -> None:
        """Draws the last step of all ranks on one clock, and with each what a simulation with the step's own costs
        says (format by suffix). Called by all ranks; the first one writes.

        Raises:
            ValueError: on all ranks, before any step, or for a format that matplotlib does not know.
            OSError: on all ranks, where it cannot be written.
            ImportError: on all ranks, where the first one has no matplotlib.
        """
        with self._guarded("timeline()", self._report.refusal(path)):
            self._report.write_timeline(Path(path))

    def summary(self) -> str:
        """The last step in a table: what each rank computed, and how long it waited before and meanwhile; and which
        stages' backwards I and W could not split, and why; and, with ``schedule="auto"``, what schedules were
        considered, with predicted steps and peaks. Called by all ranks. Clocks of other machines are read by round
        trips: times between these are as right as half of one."""
        with self._guarded("summary()"):
            return self._report.text()

    @contextlib.contextmanager
    def _guarded(self, call: str | None = None, failure: Exception | None = None) -> Iterator[None]:
        """Around what all ranks do together: a failure of one ends it on all. They meet before it, where it is `call`;
        then none does it where this rank says why it cannot, or where one is in another call."""
        if self._is_closed:
            raise RuntimeError("the pipeline engine is closed")
        with self._reshards:
            if self._ended is not None:
                raise _ended_by(self._ended)
            self._transfers.traffic.begin_phase()
            try:
                self._transfers.traffic.check()
                if call is not None:
                    self._steps.meet(call, failure)
                yield
            except StepRefusedError as refused:
                raise refused.reason from None
            except BaseException as error:
                self._ended = self._failure(error)
                if self._ended is error:
                    raise
                raise self._ended from error

    def close(self) -> None:
        """Ends the engine on this rank; others that still wait for it get a PeerError. Safe to call again; the process
        group stays."""
        if not self._is_closed:
            self._is_closed = True
            self._transfers.traffic.close()
            self._place.source.close()

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError(
            "a PipelineEngine holds groups and threads of its process: it is not copied or pickled. Save "
            "engine.state_dict(optimizer), and load it into another engine"
        )

    def __enter__(self) -> "PipelineEngine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        place, schedule = self._place, self._place.schedule
        own = ", ".join(map(str, place.stages))
        return (
            f"PipelineEngine({len(place.meshes)} stages on {schedule.num_places} places, schedule {schedule.name!r}, "
            f"{schedule.num_microbatches} microbatches; rank {self._transfers.rank}: "
            f"stage{'s' * (len(place.stages) > 1)} {own}{', closed' if self._is_closed else ''})"
        )

    @property
    def buffer_counts(self) -> tuple[int, int]:
        """Receive buffers allocated so far on this rank: how many, and their bytes. Constant after the second
        step of the same sizes, but for what waits for a W that may run early."""
        return self._place.core.num_buffers, self._place.core.buffer_bytes


def _ended_by(first: BaseException) -> BaseException:
    """What every call raises after the one that ended the engine."""
    text = f"this engine ended: {str(first) or type(first).__name__}; make a new one"
    if isinstance(first, StageError):
        return StageError(text, first.stage, first.microbatch)
    return PeerError(text, first.ranks) if isinstance(first, PeerError) else RuntimeError(text)
