"""A tensor that enters a model, crosses its stages or leaves it."""

import dataclasses

import torch

from torch_xmesh.pipeline.cut.infos import TensorInfo


@dataclasses.dataclass(frozen=True)
class ValueInfo:
    """A tensor that enters the model, crosses stages or leaves the model.

    Attributes:
        name: unique in the partition, the same on every rank.
        producer: the stage that makes it, or None for an input of the model.
        consumers: the other stages that read it, ascending; the last stage is one if it hands on another's model
            output.
        shape: for the example's number of samples.
        requires_grad: what the producer's autograd says, hence also `is_differentiable`.
        batch_dim: the dim that holds the samples, or None.
        varies: it has no batch dim and yet depends on the samples (a mean over the batch): data shards have values of
            their own.
    """

    name: str
    producer: int | None
    consumers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    batch_dim: int | None
    is_output: bool
    tensor: TensorInfo = dataclasses.field(repr=False)
    samples: int = dataclasses.field(repr=False, default=0)
    fixed_batch: bool = dataclasses.field(repr=False, default=False)
    varies: bool = dataclasses.field(repr=False, default=False)

    @property
    def is_differentiable(self) -> bool:
        return self.requires_grad

    def shape_for(self, num_samples: int) -> tuple[int, ...]:
        """The shape for a microbatch (or a data shard of one) of `num_samples` samples.

        Raises:
            ValueError: the stage works for the example's number of samples only.
        """
        if self.fixed_batch and num_samples != self.samples:
            raise ValueError(
                f"{self.name}: the model was captured for microbatches of exactly {self.samples} samples, got "
                f"{num_samples}: "
                "its forward uses the batch size in a way that does not carry over to others"
            )
        return self.tensor.shape(num_samples)
