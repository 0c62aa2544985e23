"""The ways that a model's forward takes: by sizes of its inputs, mode, autocast, and what it reads of their values."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from torch_xmesh.pipeline.capture.errors import CaptureError
from torch_xmesh.pipeline.capture.recorded import RecordedModel, resized
from torch_xmesh.pipeline.capture.recording import Guard, Recording
from torch_xmesh.pipeline.capture.regions import Autocasts, autocasts, enter_modes
from torch_xmesh.pipeline.cut.assembled import Assembled, Ports
from torch_xmesh.pipeline.cut.stage_module import StageCode
from torch_xmesh.pipeline.cut.value_info import ValueInfo
from torch_xmesh.pipeline.cut.values import MOST_SIZES, Shapes
from torch_xmesh.pipeline.cut.ways import Ways

_Key = tuple[tuple[tuple[int, ...], ...], bool | None, bool, Autocasts]


_MOST_KEYS = 4 * MOST_SIZES  # for sizes in training and evaluation, whole and of one data shard


class Variants:
    """All recordings of one model that are cut alike; the last ones used are kept.

    Attributes:
        base: the first one, with whose values between the stages all others agree.
        ways: what they compute, for ranks to compare.
    """

    def __init__(
        self,
        recorded: RecordedModel,
        base: Assembled,
        *,
        examples: Sequence[torch.Tensor],
        cut: Callable[[Recording], Assembled],
    ) -> None:
        self.base = base
        self._recorded, self._examples, self._cut = recorded, examples, cut
        self.ways = Ways()
        self._found: dict[_Key, list[Assembled]] = {}
        self._add(self._key([tuple(example.shape) for example in examples], recorded.training), base)

    def _key(self, shapes: Sequence[tuple[int, ...]], training: bool | None) -> _Key:
        return tuple(shapes), training, torch.is_grad_enabled(), autocasts()

    def of(self, shapes: Shapes, given: Mapping[str, torch.Tensor], training: bool | None) -> Assembled:
        """The way that the forward takes, under the autocast that is on, for inputs of these shapes; those of which
        values are read are `given`.

        Raises:
            CaptureError: it cannot be recorded, or other values would cross.
        """
        key = self._key([shapes[name] for name in self._recorded.names], training)
        known = self._found.get(key, ())
        for assembled in known:
            if not assembled.recording.guards or holds(assembled.recording, given):
                return assembled
        return self._add(key, self._record(shapes, given, training))

    def at(self, shapes: Shapes, training: bool | None, usual: Mapping[str, torch.Tensor]) -> Assembled:
        """A way that the forward takes for inputs of these shapes, whatever their values, with gradients; `usual` has
        inputs with values as they may be, of other shapes."""
        with torch.enable_grad():
            return self._at(shapes, training, usual)

    def _at(self, shapes: Shapes, training: bool | None, usual: Mapping[str, torch.Tensor]) -> Assembled:
        key = self._key([shapes[name] for name in self._recorded.names], training)
        known = self._found.get(key)
        if known:
            return known[0]
        given = {name: resized(tensor, shapes[name]) for name, tensor in usual.items()}
        return self._add(key, self._record(shapes, given, training, has_values=False))

    def _add(self, key: _Key, found: Assembled) -> Assembled:
        found.situation = self.ways.add(str(key), found.recording)
        known = self._found.pop(key, [])
        self._found[key] = [found, *known][:MOST_SIZES]
        if len(self._found) > _MOST_KEYS:
            del self._found[next(iter(self._found))]
        return found

    def _record(
        self, shapes: Shapes, given: Mapping[str, torch.Tensor], training: bool | None, has_values: bool = True
    ) -> Assembled:
        inputs = [
            given[name] if name in given else resized(example, shapes[name])
            for name, example in zip(self._recorded.names, self._examples, strict=True)
        ]
        found = self._cut(self._recorded.record(inputs, training))
        missing = [str(node.target) for node in found.cut.guard_inputs() if str(node.target) not in given]
        if has_values and missing:
            raise CaptureError(f"the model reads values of its input {missing[0]}, which it did not for the example")
        found.fit(self.base)
        return found


def holds(recording: Recording, given: Mapping[str, torch.Tensor]) -> bool:
    """Whether all that was read of the inputs' values would be read again."""
    environment: dict[fx.Node, Any] = {}

    def value_of(node: fx.Node) -> Any:
        if node not in environment:
            environment[node] = _compute(recording, node, value_of, given)
        return environment[node]

    with torch.no_grad():
        return all(_is_same(guard, value_of) for guard in recording.guards)


def _is_same(guard: Guard, value_of: Callable[[fx.Node], Any]) -> bool:
    args, kwargs = fx.node.map_arg((guard.args, guard.kwargs), value_of)
    try:
        value = guard.function(*args, **kwargs)
    except Exception:
        return False
    return guard.gave(value)


def _compute(
    recording: Recording, node: fx.Node, value_of: Callable[[fx.Node], Any], given: Mapping[str, torch.Tensor]
) -> Any:
    if node.op == "placeholder":
        return given[str(node.target)]
    if node.op == "get_attr":
        return recording.constants[str(node.target)]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
    modes = node.meta["modes"]
    with enter_modes(*modes) if modes else contextlib.nullcontext():
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


@dataclasses.dataclass
class StageCodes:
    """The codes of one stage for inputs of certain sizes, the number of samples apart.

    Attributes:
        inputs: what is known of the model's inputs, by name.
    """

    variants: Variants
    stage: int
    ports: Ports
    inputs: Mapping[str, ValueInfo]
    _plain: dict[tuple[int, bool | None, bool, Autocasts], StageCode] = dataclasses.field(default_factory=dict)

    def of(self, samples: int, given: Mapping[str, torch.Tensor], training: bool | None) -> StageCode:
        """For so many samples in all inputs; `given`: the model's inputs that the stage takes.

        Raises:
            CaptureError: see Variants.of.
        """
        key = samples, training, torch.is_grad_enabled(), autocasts()
        code = self._plain.get(key)
        if code is not None:
            return code
        shapes = {name: info.shape_for(samples) for name, info in self.inputs.items()}
        found = self.variants.of(shapes, given, training)
        code = found.code(self.stage, self.ports)
        if not found.recording.guards:
            self._plain[key] = code
        return code

    @property
    def reads_values(self) -> bool:
        """Whether what runs depends on the values of the model's inputs."""
        return bool(self.variants.base.recording.guards)
