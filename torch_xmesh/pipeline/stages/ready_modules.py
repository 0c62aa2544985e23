"""Stages that a user gives as modules of their own."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torch_xmesh.pipeline.cut.partition import SplitAt, partition
from torch_xmesh.pipeline.cut.split_choice import check_limit
from torch_xmesh.pipeline.cut.values import Partition
from torch_xmesh.pipeline.ranks.stage_device import device_of_meshes
from torch_xmesh.pipeline.stages.agreement import exchange_of, with_agreed_ties
from torch_xmesh.pipeline.stages.model_checks import check_given
from torch_xmesh.pipeline.stages.source import StageRequest, StageSource


class ReadyModules(StageSource):
    """One module per stage, None for those of other ranks; each takes what the one before returns.

    Args:
        example_args, example_kwargs: one microbatch's arguments of the first.
        split: must be None; PipelineEngine's argument.
    """

    names_stages = True

    def __init__(
        self,
        modules: Sequence[nn.Module | None],
        example_args: Sequence[Any],
        example_kwargs: Mapping[str, Any] | None,
        split: SplitAt | str | None,
    ) -> None:
        super().__init__()
        self._modules, self._args, self._kwargs, self._split = modules, example_args, example_kwargs, split

    def check(self) -> None:
        """Raises ValueError for what a user may not give."""
        check_given(self._modules, self._args, self._kwargs, self._split)

    def fields(self) -> list[tuple[str, str]]:
        """What of it must be equal on all ranks, by name."""
        return [("the model", "a list of stage modules"), ("split", repr(self._split)), ("plan", "none")]

    def partition(self, request: StageRequest) -> Partition:
        """The stages; who has a module tells the others what it returns."""
        check_limit(self._split, None if request.is_auto else request.memory_limit_bytes)
        cut = partition(
            self._modules,
            self._args,
            self._kwargs,
            self._split,
            num_stages=len(request.meshes),
            exchange=exchange_of(request.transfers, request.meshes),
            device=device_of_meshes(request.meshes),
            args_chunk_spec=request.chunk_specs["args"],
            kwargs_chunk_spec=request.chunk_specs["kwargs"],
        )
        return with_agreed_ties(cut, request.transfers, request.meshes)

    def release(self) -> None:
        """The modules and the example are let go of."""
        super().release()
        self._modules, self._args, self._kwargs = (), (), None
