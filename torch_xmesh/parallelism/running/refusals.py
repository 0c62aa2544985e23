"""What a recorded forward does that a plan's stages would do otherwise, unseen: it is refused."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torch_xmesh.parallelism.operators import Recorded
from torch_xmesh.parallelism.reading import recorded_turns
from torch_xmesh.pipeline.capture.recording import difference, nodes_behind


@dataclasses.dataclass(frozen=True)
class Runnable:
    """A forward that stages can run.

    Attributes:
        depends_on_mode: it does something else in the other mode, of training and evaluation.
    """

    recorded: Recorded
    depends_on_mode: bool


def runnable(model: nn.Module, example_args: Sequence[Any], example_kwargs: Mapping[str, Any] | None) -> Runnable:
    """Raises ValueError for a forward that depends on values, on how often it was called, or that changes buffers in a
    way that parts of them would not."""
    first, again, other = recorded_turns(model, example_args, dict(example_kwargs or {}))
    for guard in first.recording.guards:
        behind = (one for node in guard.nodes for one in nodes_behind(node))
        if all(one.op != "placeholder" for one in behind):
            continue  # of constants: it is what it was
        raise ValueError(f"the forward depends on values ({guard.source}): a plan's stages would do as for the example")
    if differs := difference(first.recording, again.recording):
        raise ValueError(f"the forward does something else the next time ({differs}): a plan's stages would not")
    _check_buffers(first)
    return Runnable(first, bool(difference(first.recording, other.recording)))


def _check_buffers(recorded: Recorded) -> None:
    readers: dict[str, int] = {}
    for site in recorded.sites:
        for name in {value.name for value in site.sources if value.is_parameter}:
            readers[name] = readers.get(name, 0) + 1
    for name, changer in recorded.recording.changed_buffers.items():
        if name.endswith("num_batches_tracked"):
            continue  # a counter that nothing here reads
        changers = [number for number, site in enumerate(recorded.sites) if site.node is changer]
        is_constant = any(recorded.forward.operators[number].is_constant for number in changers)
        if readers.get(name, 0) != 1 or not changers or is_constant:
            raise ValueError(
                f"buffer {name} is changed by the forward, and not by one operator alone that reads it: on parts that "
                "cannot be run"
            )
