"""Which source an engine's arguments mean."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from torch_xmesh.pipeline.cut.partition import SplitAt
from torch_xmesh.pipeline.ranks.stage_mesh import DEFAULT_AXIS
from torch_xmesh.pipeline.schedule.schedule import Schedule
from torch_xmesh.pipeline.stages.cut_model import CutModel
from torch_xmesh.pipeline.stages.ready_modules import ReadyModules
from torch_xmesh.pipeline.stages.source import StageSource
from torch_xmesh.spec import AnyMesh

if TYPE_CHECKING:
    from torch_xmesh.parallelism.plan import ParallelPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Where stages are and in which order they run: PipelineEngine's arguments of these names, which a plan has, too.

    Attributes:
        others: what else may not be given beside a plan, by name; None where it was not.
    """

    meshes: Sequence[AnyMesh] | None
    schedule: str | Schedule | type[Any]
    num_microbatches: int | str | None
    data_axis: Any
    others: Mapping[str, Any]

    def given(self) -> list[str]:
        """The names of those that were given."""
        found = {
            "meshes": self.meshes,
            "schedule": None if self.schedule == "auto" else self.schedule,
            "num_microbatches": self.num_microbatches,
            "data_axis": None if self.data_axis is DEFAULT_AXIS else [self.data_axis],
            **self.others,
        }
        return [name for name, argument in found.items() if argument is not None]


def source_of(
    model: Any,
    example_args: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None,
    *,
    split: SplitAt | str | None,
    plan: "ParallelPlan | None",
    arrangement: Arrangement,
) -> tuple[StageSource, Arrangement]:
    """The source, and the arrangement of its stages: a plan's is the plan's.

    Raises:
        ValueError: something was given that follows from the plan, or the plan does not fit.
    """
    if plan is None:
        if isinstance(model, nn.Module):
            return CutModel(model, example_args, example_kwargs, split), arrangement
        return ReadyModules(model, example_args, example_kwargs, split), arrangement
    if given := ["split"] * (split is not None) + arrangement.given():
        raise ValueError(f"{given[0]} follows from the plan: leave it out")
    from torch_xmesh.parallelism.running.planned import PlannedStages

    source = PlannedStages(plan, model, example_args, example_kwargs)
    return source, dataclasses.replace(
        arrangement,
        meshes=source.meshes,
        schedule=source.schedule,
        num_microbatches=source.num_microbatches,
        data_axis=None,
    )
