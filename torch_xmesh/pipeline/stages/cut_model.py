"""Stages of a model that is cut at the user's points, or where measured time is balanced."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torch_xmesh.pipeline.cut.partition import SplitAt, partition
from torch_xmesh.pipeline.cut.split_choice import check_limit, choose_split
from torch_xmesh.pipeline.cut.values import Partition
from torch_xmesh.pipeline.ranks.stage_device import device_of_meshes
from torch_xmesh.pipeline.stages.agreement import with_agreed_ties
from torch_xmesh.pipeline.stages.live_model import LiveModel
from torch_xmesh.pipeline.stages.model_checks import check_given
from torch_xmesh.pipeline.stages.source import StageRequest, StageSource


class CutModel(StageSource):
    """A model, cut into stages.

    Args:
        example_args, example_kwargs: one microbatch's arguments.
        split: where it is cut, as PipelineEngine takes it.
    """

    def __init__(
        self,
        model: nn.Module,
        example_args: Sequence[Any],
        example_kwargs: Mapping[str, Any] | None,
        split: SplitAt | str | None,
    ) -> None:
        super().__init__(model)
        self._args, self._kwargs, self._split = example_args, example_kwargs, split

    def check(self) -> None:
        """Raises ValueError for what a user may not give."""
        check_given(self.model, self._args, self._kwargs, self._split)

    def fields(self) -> list[tuple[str, str]]:
        """What of it must be equal on all ranks, by name."""
        return [("the model", "a module"), ("split", repr(self._split)), ("plan", "none")]

    def partition(self, request: StageRequest) -> Partition:
        """The stages. A split="auto" is found by the first rank, for all."""
        assert self.model is not None
        check_limit(self._split, None if request.is_auto else request.memory_limit_bytes)
        specs = {"args_chunk_spec": request.chunk_specs["args"], "kwargs_chunk_spec": request.chunk_specs["kwargs"]}
        num_stages, transfers, split = len(request.meshes), request.transfers, self._split
        if split == "auto":
            leader = transfers.ranks[0]
            chosen: Any = None
            if transfers.rank == leader:
                chosen = choose_split(
                    self.model,
                    self._args,
                    self._kwargs,
                    num_stages,
                    memory_limit_bytes=request.memory_limit_bytes,
                    microbatches_in_flight=request.in_flight,
                    **specs,
                )
            split = transfers.broadcast("split", leader, chosen)
        device = device_of_meshes(request.meshes)
        cut = partition(self.model, self._args, self._kwargs, split, num_stages=num_stages, device=device, **specs)
        return with_agreed_ties(cut, transfers, request.meshes)

    def live(self, partition: Partition) -> LiveModel | None:
        """The model, if it was recorded."""
        return LiveModel(self.model, partition.opened) if partition.opened and self.model is not None else None

    def release(self) -> None:
        """The model and its example are let go of."""
        super().release()
        self._args, self._kwargs = (), None
