"""What a recorded forward does that a plan's stages would do otherwise, unseen: it is refused."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from torch_xmesh.parallelism.operators import Recorded
from torch_xmesh.parallelism.reading import recorded_turns
from torch_xmesh.pipeline.capture.recording import difference


@dataclasses.dataclass(frozen=True)
class Turns:
    """A forward that stages can run.

    Attributes:
        other: in the other mode, of training and evaluation; None: it does the same in both, ValueError: something that
            cannot be run.
    """

    recorded: Recorded
    other: Recorded | ValueError | None

    @property
    def runnable(self) -> list[Recorded]:
        """Those of both modes that can be run."""
        return [one for one in (self.recorded, self.other) if isinstance(one, Recorded)]


def runnable(model: nn.Module, example_args: Sequence[Any], example_kwargs: Mapping[str, Any] | None) -> Turns:
    """Raises ValueError for a forward that depends on values, on how often it was called, or that changes buffers in a
    way that parts of them would not."""
    first, again, other = recorded_turns(model, example_args, dict(example_kwargs or {}))
    check_runnable(first, model)
    if differs := difference(first.recording, again.recording):
        raise ValueError(f"the forward does something else the next time ({differs}): a plan's stages would not")
    if isinstance(other, ValueError):
        return Turns(first, other)
    unseen = [[(one.draws, one.checkpoint) for one in turn.forward.operators] for turn in (first, other)]
    if not difference(first.recording, other.recording) and unseen[0] == unseen[1]:
        return Turns(first, None)
    try:
        _check_alike(first, other)
        check_runnable(other, model)
    except ValueError as error:
        return Turns(first, error)
    return Turns(first, other)


def check_runnable(recorded: Recorded, model: nn.Module) -> None:
    """Raises ValueError for a forward that, as it was recorded, no plan's stages can do."""
    _check_guards(recorded)
    _check_checkpoints(recorded)
    _check_changes(recorded, {name for name, _ in model.named_parameters(remove_duplicate=False)})


def _check_alike(first: Recorded, other: Recorded) -> None:
    """Modes may differ in what operators do and in some that one of them lacks, not in what the model returns."""
    known = {one.name: [value.shape for value in one.makes] for one in first.forward.operators}
    for one in other.forward.operators:
        if not one.is_constant and known.get(one.name) != [value.shape for value in one.makes]:
            raise ValueError(f"in the other there is {one.name}, which the plan does not know so")
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


def _check_changes(recorded: Recorded, parameters: Collection[str]) -> None:
    readers: dict[str, int] = {}
    for site in recorded.sites:
        for name in {value.name for value in site.sources if value.is_parameter}:
            readers[name] = readers.get(name, 0) + 1
    for name, changer in recorded.recording.changed_tensors.items():
        if name in parameters:
            raise ValueError(
                f"the forward writes to parameter {name}, in {changer.name}: with a plan devices have parts of it, "
                "which that would not reach"
            )
        if name.endswith("num_batches_tracked"):
            continue  # a counter that nothing here reads
        changers = [number for number, site in enumerate(recorded.sites) if site.node is changer]
        is_constant = any(recorded.forward.operators[number].is_constant for number in changers)
        if readers.get(name, 0) != 1 or not changers or is_constant:
            raise ValueError(
                f"buffer {name} is changed by the forward, and not by one operator alone that reads it: on parts that "
                "cannot be run"
            )
