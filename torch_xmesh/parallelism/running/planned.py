"""A plan's stages in the pipeline engine."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.utils import _pytree as pytree

from torch_xmesh.devices import check_current, device_here, device_of, is_device_here
from torch_xmesh.digests import checksum, digest_of
from torch_xmesh.parallelism.dividing import check_divided
from torch_xmesh.parallelism.forward_modes import runnable
from torch_xmesh.parallelism.plan import ParallelPlan, PlannedStage, fingerprint_of
from torch_xmesh.parallelism.plan_checks import check_programs
from torch_xmesh.parallelism.program_writer import with_programs
from torch_xmesh.parallelism.recorded_forwards import part_of_samples, samples_of
from torch_xmesh.parallelism.running.called_modules import check_buffers
from torch_xmesh.parallelism.running.loss import LossShares
from torch_xmesh.parallelism.running.optimizer_watch import OptimizerWatch, warn_of_own_parameters
from torch_xmesh.parallelism.running.partitioned import crossing_placements, planned_partition
from torch_xmesh.parallelism.running.planned_model import PlannedModel
from torch_xmesh.parallelism.running.stage import ShardedStage
from torch_xmesh.parallelism.running.stage_groups import StageGroups, parameter_meshes
from torch_xmesh.pipeline.cut.values import Partition, sorted_arguments
from torch_xmesh.pipeline.schedule.schedule import Schedule
from torch_xmesh.pipeline.stages.batch_parts import ByRank
from torch_xmesh.pipeline.stages.live_model import LiveModel
from torch_xmesh.pipeline.stages.model_checks import check_given
from torch_xmesh.pipeline.stages.source import StageRequest, StageSource
from torch_xmesh.spec import Mesh


class PlannedStages(StageSource):
    """The stages of a plan, with its meshes and its schedule. What crosses between stages lies on each as the plan
    says.

    Attributes:
        meshes: by stage.

    Raises:
        ValueError: the plan is for another model, other sizes or other ranks, or something of it cannot be run.
    """

    parts = ByRank()
    sums_gradients = True

    def __init__(
        self,
        plan: ParallelPlan,
        model: Any,
        example_args: Sequence[Any],
        example_kwargs: Mapping[str, Any] | None,
    ) -> None:
        super().__init__()
        if not isinstance(plan, ParallelPlan):
            raise ValueError(f"plan is an xm.ParallelPlan, got {plan!r} ({type(plan).__name__})")
        if not isinstance(model, nn.Module):
            raise ValueError(f"with a plan the model is one nn.Module, got {type(model).__name__}")
        check_given(model, example_args, example_kwargs, None)
        device = device_of(model, "the model") or _device_of_plan(plan)
        self._kind = device.type
        _check_device(device)
        self._given: nn.Module | None = model
        self._live = PlannedModel(model)
        self._arguments = _of_microbatch(plan, sorted_arguments(example_args, example_kwargs))
        self._modes = runnable(model, *self._arguments, device=device)
        for number, turn in enumerate(self._modes.runnable):
            self.ways.add(f"turn {number}", turn.recording)
        self._check(plan)
        self._plan = plan if plan.stages[0].programs else self._with_programs(plan)
        for number, stage in enumerate(self._plan.stages):
            check_divided(stage, number, self._modes.by_mode)
        check_buffers(model, self._modes.recorded, [_operators_of(stage) for stage in self._plan.stages])
        self._grids = [
            _ascending(torch.tensor(stage.ranks, device="cpu").view(stage.mesh_shape)) for stage in plan.stages
        ]
        self.meshes = [Mesh(grid, device_type=self._kind) for grid in self._grids]
        self.placements = crossing_placements(self._plan)
        self.schedule = Schedule.from_csv(plan.schedule_csv, name=plan.schedule)
        self.num_microbatches = plan.num_microbatches
        self._digest = digest_of(plan.to_json())
        self._num_samples: int | None = None
        self._stages: dict[int, ShardedStage] = {}
        self._optimizers: OptimizerWatch | None = None
        self._groups: list[StageGroups | None] = []

    def _check(self, plan: ParallelPlan) -> None:
        operators = self._modes.recorded.forward.operators
        found = fingerprint_of(
            [operator.name for operator in operators], [operator.makes[0].shape for operator in operators]
        )
        if found != plan.fingerprint:
            raise ValueError(
                f"the plan is for another model, or for microbatches of another size: it was made of {plan.model} "
                f"({plan.fingerprint}), this is {found}"
            )
        ranks = sorted(rank for stage in plan.stages for rank in stage.ranks)
        if ranks != list(range(dist.get_world_size())):
            raise ValueError(f"the plan is for ranks {ranks}, the processes are {dist.get_world_size()}")

    def _with_programs(self, plan: ParallelPlan) -> ParallelPlan:
        """A plan of a file that has none."""
        out = with_programs(plan, self._modes, samples_of(*self._arguments))
        check_programs(out)
        return out

    def fields(self) -> list[tuple[str, str]]:
        """What of it must be equal on all ranks, by name."""
        return [
            ("the model", "a module"),
            ("split", "None"),
            ("plan", self._digest),
            ("the model's type of device", self._kind),
        ]

    def partition(self, request: StageRequest) -> Partition:
        """The stages.

        Raises:
            ValueError: the ranks' models have other values.
        """
        assert self._given is not None
        if self._plan.parts > 1 and not all(map(_is_along_first, request.chunk_specs.values())):
            raise ValueError(
                f"the plan cuts each microbatch into {self._plan.parts} parts along dim 0, where args_chunk_spec and "
                "kwargs_chunk_spec say that samples are elsewhere: plan with overlap=False, or two microbatches"
            )
        modules = self._modules(self._given, request)
        out = planned_partition(
            self._given,
            self._modes,
            self._plan,
            modules,
            self._arguments,
            request.chunk_specs,
            device=device_here(self._kind),
        )
        self._num_samples = out.batch_size
        return out

    def release(self) -> None:
        """The model and its example are let go of."""
        super().release()
        self._given, self._arguments = None, ((), {})

    def live(self, partition: Partition) -> LiveModel | None:
        """The model, as long as it is there."""
        return self._live

    def _modules(self, model: nn.Module, request: StageRequest) -> list[ShardedStage | None]:
        """By stage this rank's modules."""
        transfers = request.transfers
        told = transfers.gather("the model's values", _digest_of(model))
        others = [rank for rank, digest in zip(transfers.ranks, told, strict=True) if digest != told[0]]
        if others:
            raise ValueError(
                f"ranks disagree on the model's values: rank {others[0]} has others than rank {transfers.ranks[0]}; "
                "with a plan each takes its parts of its own model: seed them alike, or load the same state"
            )
        by_samples = request.is_mean and all(_is_along_first(specs) for specs in request.chunk_specs.values())
        meshes = parameter_meshes(self._grids, self._kind)
        self._groups = StageGroups.make(self._grids, device_here(self._kind), transfers)
        transfers.traffic.meet([])  # nobody leaves with an error of its own while others connect
        self._stages = {
            number: ShardedStage(
                model,
                self._modes,
                self._plan,
                number,
                meshes[number],
                transfers,
                is_by_samples=by_samples,
                groups=self._groups[number],
            )
            for number, stage in enumerate(self._plan.stages)
            if transfers.rank in stage.ranks
        }
        own = [parameter for stage in self._stages.values() for parameter in stage.parameters()]
        self._optimizers = OptimizerWatch(own)
        if transfers.rank == transfers.ranks[0]:
            warn_of_own_parameters()
        return [self._stages.get(number) for number in range(len(self._plan.stages))]

    def check_step(self, samples: int | None, *, is_sync: bool, is_train: bool) -> None:
        """Whether a step may begin; nothing is changed.

        Raises:
            ValueError: for another number of samples than the plan's, in no_sync(), in a mode in which the stages
                cannot be run, where parameters were frozen or unfrozen, or have hooks.
        """
        each, number = self._num_samples, self.num_microbatches
        if samples is not None and each and samples != each * number:
            raise ValueError(
                f"a step of this plan takes {each * number} samples, {number} microbatches of {each} as in the "
                f"example, and got {samples}. Every rank passes the whole batch, or with sharded=True an equal part of "
                "it; a DataLoader with drop_last=True gives no short batch"
            )
        if is_train and not is_sync:
            raise ValueError("no_sync() cannot be used with a plan")
        for stage in self._stages.values():
            stage.check_mode()
            stage.own.check()

    def begin_step(self, is_train: bool) -> None:
        """Parameters are made ready for all microbatches."""
        if is_train and self._optimizers is not None:
            self._optimizers.begin_step()
        for stage in self._stages.values():
            stage.begin_step()

    def loss_shares(self, stage: int) -> LossShares | None:
        """How the loss of a stage of this rank is shared among its devices; None if it is not the last stage."""
        return self._stages[stage].loss_shares

    def weights_done(self, stage: int, segment: int, microbatch: int, is_last: bool) -> None:
        """Gradients leave."""
        self._stages[stage].own.weights_done(segment, microbatch, is_last)

    def end_step(self, is_train: bool) -> None:
        """Gradients lie as the parameters do."""
        for stage in self._stages.values():
            stage.own.end_step(is_train)

    def close(self) -> None:
        """No step comes any more on this rank."""
        for groups in self._groups:
            if groups is not None:
                groups.leave()


def _check_device(device: torch.device) -> None:
    """Raises ValueError where collectives among a plan's devices could not be carried, or would be on another one."""
    if device.type == "cpu":
        return
    check_current(device, "the model")
    group = dist.distributed_c10d._get_default_group()
    if device.type not in {one.type for one in group._device_types}:
        raise ValueError(
            f"the model is on {device}, and the default group carries no {device.type} tensors: a plan's operators "
            f'need its collectives, so call init_process_group("cpu:xmesh,{device.type}:xmesh")'
        )


def _device_of_plan(plan: ParallelPlan) -> torch.device:
    """Where a model on the meta device runs."""
    kind = plan.device_type or "cpu"
    if not is_device_here(kind):
        raise ValueError(
            f"the plan was made for {kind} devices, the model is on meta, and this process has no such device"
        )
    return device_here(kind)


def _of_microbatch(
    plan: ParallelPlan, arguments: tuple[tuple[Any, ...], dict[str, Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one of the plan's microbatches, where the example is cut into several."""
    if plan.parts == 1:
        return arguments
    part = part_of_samples(*arguments, plan.parts)
    if part is None:
        raise ValueError(
            f"the plan cuts a microbatch into {plan.parts} parts, and the example's samples along dim 0 "
            f"({samples_of(*arguments)}) do not divide so"
        )
    return part


def _operators_of(stage: PlannedStage) -> set[str]:
    """In any mode."""
    return {operator.name for program in stage.programs for operator in program.operators}


def _ascending(grid: torch.Tensor) -> torch.Tensor:
    """A mesh's rows and columns in another order, so that ranks ascend along each: torch's process groups are in that
    order, whatever the mesh says, and which of the devices has which part is the same to a plan.

    Raises:
        ValueError: no order does.
    """
    if grid.dim() == 1:
        return grid.sort().values
    out = grid[:, grid[0].argsort()]
    out = out[out[:, 0].argsort()]
    if not all(bool((out.diff(dim=axis) > 0).all()) for axis in (0, 1)):
        raise ValueError(
            f"ranks of a mesh ascend along its rows and columns, in some order of these: got {grid.tolist()}"
        )
    return out


def _is_along_first(specs: Any) -> bool:
    """Whether samples are along the first dim of all tensors."""
    chunks = [leaf for leaf in pytree.tree_leaves(specs) if isinstance(leaf, TensorChunkSpec)]
    return all(chunk.split_dim == 0 for chunk in chunks)


def _digest_of(model: nn.Module) -> str:
    """A hash of the names and values of all parameters and buffers. Those on meta have no values."""
    named = sorted((*model.named_parameters(), *model.named_buffers()), key=lambda item: item[0])
    return digest_of(*(part for name, tensor in named for part in (name, b"" if tensor.is_meta else checksum(tensor))))
