"""A plan's stages in the pipeline engine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_xmesh.parallelism.operators import Recorded
from torch_xmesh.parallelism.plan import ParallelPlan, fingerprint_of
from torch_xmesh.parallelism.reading import recorded_forward
from torch_xmesh.parallelism.running.stage import ShardedStage
from torch_xmesh.pipeline.engine.engine import PipelineEngine
from torch_xmesh.pipeline.schedule.schedule import Schedule
from torch_xmesh.spec import Mesh


class PlannedEngine:
    """Trains a model as a plan says. Called by all ranks of the default group.

    What crosses between stages is whole on all devices of both: it is brought so, sent, and cut again.

    Args:
        plan: for this model and these arguments.
        model: with the same values on all ranks.
        example_args, example_kwargs: one microbatch's, as the plan was made for.
        loss_fn: of the last stage's whole output.

    Raises:
        ValueError: the plan is for another model, other sizes or other ranks, or something of it cannot be run.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        model: nn.Module,
        example_args: Sequence[Any] = (),
        example_kwargs: Mapping[str, Any] | None = None,
        *,
        loss_fn: Callable[..., torch.Tensor],
    ) -> None:
        recorded = recorded_forward(model, example_args, dict(example_kwargs or {}))
        _check(plan, recorded)
        grids = [torch.tensor(stage.ranks).view(stage.mesh_shape) for stage in plan.stages]
        meshes = [DeviceMesh("cpu", grid) for grid in grids]  # made by all ranks
        rank = dist.get_rank()
        self._stages = {
            number: ShardedStage(model, recorded, plan, number, meshes[number])
            for number, stage in enumerate(plan.stages)
            if rank in stage.ranks
        }
        self._engine = PipelineEngine(
            [self._stages.get(number) for number in range(len(plan.stages))],
            tuple(example_args),
            dict(example_kwargs or {}),
            meshes=[Mesh(grid) for grid in grids],
            schedule=Schedule.from_csv(plan.schedule_csv, name=plan.schedule),
            num_microbatches=plan.num_microbatches,
            loss_fn=loss_fn,
            data_axis=None,
            init_sync=False,
        )

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """One training step: see :meth:`PipelineEngine.step`."""
        for stage in self._stages.values():
            stage.begin_step()
        out = self._engine.step(*args, target=target, **kwargs)
        for stage in self._stages.values():
            stage.finish_gradients()
        return out

    def last_loss(self) -> float | None:
        """Of the last step, on the last stage's ranks."""
        return self._engine.last_loss()

    def parts(self) -> list[tuple[int, ShardedStage]]:
        """This rank's stages, with their numbers."""
        return list(self._stages.items())

    def parameters(self) -> Iterator[nn.Parameter]:
        """This device's parts of them."""
        for stage in self._stages.values():
            yield from stage.parameters()

    def close(self) -> None:
        self._engine.close()


def _check(plan: ParallelPlan, recorded: Recorded) -> None:
    operators = recorded.forward.operators
    found = fingerprint_of([one.name for one in operators], [one.makes[0].shape for one in operators])
    if found != plan.fingerprint:
        raise ValueError(
            f"the plan is for another model, or for microbatches of another size: it was made of {plan.model} "
            f"({plan.fingerprint}), this is {found}"
        )
    ranks = sorted(rank for stage in plan.stages for rank in stage.ranks)
    if ranks != list(range(dist.get_world_size())):
        raise ValueError(f"the plan is for ranks {ranks}, the group has {dist.get_world_size()}")
