"""A model's forward in both modes, of training and evaluation. What it does that a plan's stages would do otherwise,
unseen, is refused."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from torch_xmesh.parallelism.called_whole import changed_in_other_ways, gradients_of
from torch_xmesh.parallelism.operators import Recorded
from torch_xmesh.parallelism.program import BOTH, EVALUATION, TRAINING
from torch_xmesh.parallelism.recorded_forwards import recorded_turns
from torch_xmesh.pipeline.capture.recording import difference


@dataclasses.dataclass(frozen=True)
class ForwardModes:
    """A forward that stages can run.

    Attributes:
        recorded: in the mode in which the model came.
        other: in the other mode; None: it does the same in both, ValueError: something that cannot be run.
        is_training: whether the model came in the mode of training.
    """

    recorded: Recorded
    other: Recorded | ValueError | None
    is_training: bool = True

    @property
    def mode(self) -> str:
        """What `recorded` is of, as programs say it."""
        if self.other is None:
            return BOTH
        return TRAINING if self.is_training else EVALUATION

    @property
    def by_mode(self) -> dict[str, Recorded]:
        """The forwards that can be run, by mode."""
        own = TRAINING if self.is_training else EVALUATION
        other = self.recorded if self.other is None else self.other
        return {own: self.recorded} | ({} if isinstance(other, ValueError) else {self.other_mode: other})

    @property
    def other_mode(self) -> str:
        return EVALUATION if self.is_training else TRAINING

    @property
    def runnable(self) -> list[Recorded]:
        """Those of both modes that can be run."""
        return [turn for turn in (self.recorded, self.other) if isinstance(turn, Recorded)]


def runnable(
    model: nn.Module,
    example_args: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None,
    *,
    checks_next: bool = True,
    device: torch.device | None = None,
) -> ForwardModes:
    """The forward in both modes.

    Args:
        checks_next: the forward is recorded once more, and compared.
        device: where a model on meta will run; None for the CPU.

    Raises:
        ValueError: it depends on values, on how often it was called, or changes buffers in a way that parts of them
            would not.
    """
    kwargs = dict(example_kwargs or {})
    (first, *again), other = recorded_turns(model, example_args, kwargs, 1 + checks_next, device=device)
    check_runnable(first, model)
    for turn in again:
        if differs := difference(first.recording, turn.recording):
            raise ValueError(f"the forward does something else the next time ({differs}): a plan's stages would not")
    if isinstance(other, ValueError):
        return ForwardModes(first, other, model.training)
    unseen = [[(operator.draws, operator.checkpoint) for operator in turn.forward.operators] for turn in (first, other)]
    if not difference(first.recording, other.recording) and unseen[0] == unseen[1]:
        return ForwardModes(first, None, model.training)
    try:
        _check_alike(first, other)
        check_runnable(other, model)
    except ValueError as error:
        return ForwardModes(first, error, model.training)
    return ForwardModes(first, other, model.training)


def check_runnable(recorded: Recorded, model: nn.Module) -> None:
    """Raises ValueError for a forward that, as it was recorded, no plan's stages can do."""
    _check_guards(recorded)
    _check_checkpoints(recorded)
    _check_changes(recorded, model)
    _check_gradients(recorded)


def _check_alike(first: Recorded, other: Recorded) -> None:
    """Modes may differ in what operators do and in some that one of them lacks, not in what the model returns."""
    known = {operator.name: [value.shape for value in operator.makes] for operator in first.forward.operators}
    for operator in other.forward.operators:
        if not operator.is_constant and known.get(operator.name) != [value.shape for value in operator.makes]:
            raise ValueError(f"in the other there is {operator.name}, which the plan does not know so")
    if _output_of(first) != _output_of(other):
        raise ValueError("in the other it returns something else")


def _output_of(recorded: Recorded) -> tuple[Any, ...]:
    leaves, structure = pytree.tree_flatten(recorded.recording.output)
    return [recorded.values[leaf].name if isinstance(leaf, fx.Node) else leaf for leaf in leaves], structure


def _check_guards(recorded: Recorded) -> None:
    for guard in recorded.recording.value_guards:
        raise ValueError(f"the forward depends on values ({guard.source}): a plan's stages would do as for the example")


def _check_checkpoints(recorded: Recorded) -> None:
    if recorded.recording.closed_checkpoints:
        where = recorded.recording.closed_checkpoints[0]
        raise ValueError(f"an activation checkpoint at {where} is inside of a module that cannot be looked into")


def _check_changes(recorded: Recorded, model: nn.Module) -> None:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, changer in recorded.recording.changed_tensors.items():
        if name in parameters:
            raise ValueError(
                f"the forward writes to parameter {name}, in {changer.name}: with a plan devices have parts of it, "
                "which that would not reach"
            )
    for name in changed_in_other_ways(recorded, model):
        raise ValueError(
            f"buffer {name} is changed by the forward, and not by one operator alone that reads it: on parts that "
            "cannot be run; a module other than the model itself, with the buffer and all that reads it, is called as "
            "one and can"
        )


def _check_gradients(recorded: Recorded) -> None:
    for node in gradients_of(recorded):
        raise ValueError(
            f"the forward calls torch.autograd.grad, at {node.meta['source']}: through collectives that cannot be run; "
            "a module other than the model itself, with that and all that is differentiated, is called as one and can"
        )
