"""What no model of an engine may be."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from torch_xmesh.arguments import no_inference_tensors
from torch_xmesh.pipeline.capture.wrappers import averaging_wrappers
from torch_xmesh.pipeline.cut.partition import SplitAt, check_example


def check_given(model: Any, example_args: Any, example_kwargs: Any, split: Any) -> None:
    """Raises ValueError for a model, an example or split points of other kinds than PipelineEngine takes."""
    check_model(model, "model")
    check_example(model, example_args, example_kwargs, split)
    if split is not None and not isinstance(split, SplitAt | str):
        raise ValueError(f"split is xm.split_at(...), 'auto' or None, got {split!r}")


def check_model(model: Any, what: str) -> None:
    """Raises ValueError for what is no module nor a list of them, averages gradients itself, or was made in
    inference mode."""
    if isinstance(model, Sequence) and not isinstance(model, str | nn.Module):
        for stage, module in enumerate(model):
            if module is not None:
                check_model(module, f"stage {stage}'s module")
    elif not isinstance(model, nn.Module):
        raise ValueError(f"{what} is an nn.Module, or a list of stage modules, got {type(model).__name__}")
    elif isinstance(model, averaging_wrappers()):
        raise ValueError(
            f"{what} is wrapped in {type(model).__name__}: pass the plain module; data_axis= says over which mesh axis "
            "the batch is sharded, and the engine sums gradients over it (fully_shard goes into parallelize=)"
        )
    else:
        no_inference_tensors(model)
