"""What operators take on the device at hand: each is measured once, with the sizes that a device has of it."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xmesh.parallelism.compute import Compute, ComputeSeconds, least_seconds
from torch_xmesh.parallelism.loops import Choice, num_devices_used
from torch_xmesh.parallelism.operators import Operator
from torch_xmesh.parallelism.rows.registry import Tensor

_VERSION = 1
_RUNS, _ENOUGH_SECONDS = 5, 0.1
"""An operator is run so often, and no more once that has taken so long."""

_WRITES = frozenset("__setitem__ __iadd__ __isub__ __imul__ __itruediv__ iadd isub imul itruediv".split())

Times = tuple[float, float, float]
"""Seconds of a forward, of its inputs' gradients, and of its parameters' gradients."""
Shapes = tuple[tuple[int, ...], ...]
"""Of the tensors among an operator's arguments, on a device."""


@dataclasses.dataclass(frozen=True, eq=False)
class OperatorTimes(Compute):
    """What each operator takes, in place of rates that all have in common: small products are slower than large ones,
    and kernels differ. An operator is measured the first time that a search asks for it, once with the sizes that a
    device has of it. Processes measure differently, and their plans would differ: one measures and saves, all load.

    Made by its `measured` and `load`.

    Attributes:
        flops, bytes_per_s: rates of what cannot be measured by itself: what changes tensors in place, experts of a
            mixture, stages of unlike devices, and what is not in the table where there is no `device`.
        device: on which operators are measured; None: those in the table are known, no others are measured.
        table: (forward, inputs' gradients, parameters' gradients) by operator, seconds.
    """

    device: str | None = None
    table: dict[str, Times] = dataclasses.field(default_factory=dict, repr=False)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @classmethod
    def measured(cls, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> "OperatorTimes":
        """With the device's rates measured now, and operators as they are asked for."""
        rates = Compute.measured(dtype, device)
        return cls(rates.flops, rates.bytes_per_s, str(device))

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str | None = None) -> "OperatorTimes":
        """What :meth:`save` has written; with a `device` what is missing is measured there.

        Raises:
            ValueError: the file is none of these.
        """
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
            if fields["version"] != _VERSION:
                raise ValueError(f"version {fields['version']!r}")
            table = {str(key): _times(times) for key, times in fields["operators"].items()}
            return cls(fields["flops"], fields["bytes_per_s"], None if device is None else str(device), table)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} has no times of operators: {type(error).__name__}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Writes what is known, as JSON.

        Raises:
            OSError: it cannot be written.
        """
        fields = {
            "version": _VERSION,
            "flops": self.flops,
            "bytes_per_s": self.bytes_per_s,
            "operators": {key: times for key, times in sorted(self.table.items()) if not math.isnan(times[0])},
        }
        Path(path).write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")

    def describe(self) -> str:
        return f"as measured, others {super().describe()}"

    def kind_of(self, operator: Operator) -> tuple[object, ...]:
        return () if operator.call is None else (operator.kind, operator.call.text)

    def of_operator(self, operator: Operator, choice: Choice, mesh_shape: Sequence[int]) -> ComputeSeconds:
        rated = super().of_operator(operator, choice, mesh_shape)
        if not _is_alone(operator):
            return rated
        found = self._found(operator, _shapes(operator, choice, mesh_shape))
        share = 1.0
        if found is None:  # its other arguments are for the whole
            found, share = self._found(operator, _shapes(operator, None, ())), num_devices_used(choice, mesh_shape)
        if found is None:
            return rated
        forward, inputs, weights = (seconds / share for seconds in found)
        return ComputeSeconds(forward, inputs + (forward if operator.is_computed_again else 0.0), weights)

    def _found(self, operator: Operator, shapes: Shapes) -> Times | None:
        """None of what does not run with these shapes, or is not known."""
        key = _text(operator, shapes)
        if key not in self.table and self.device is not None:
            try:
                self.table[key] = _run(operator, shapes, torch.device(self.device))
            except (RuntimeError, ValueError, IndexError, AssertionError, TypeError):
                self.table[key] = (math.nan,) * 3
        found = self.table.get(key)
        return None if found is None or math.isnan(found[0]) else found


def _times(given: Any) -> Times:
    forward, inputs, weights = (float(one) for one in given)
    if min(forward, inputs, weights) < 0:
        raise ValueError(f"negative seconds {given}")
    return forward, inputs, weights


def _is_alone(operator: Operator) -> bool:
    """Whether it can be called by itself: a function that computes something and leaves what it is given as it is."""
    is_in_place = operator.kind in _WRITES or (operator.kind.endswith("_") and not operator.kind.endswith("__"))
    return operator.call is not None and not (operator.is_constant or operator.views or is_in_place)


def _shapes(operator: Operator, choice: Choice | None, mesh_shape: Sequence[int]) -> Shapes:
    """Of a device's parts; without a choice of the whole."""
    assert operator.call is not None
    shapes = {one.index: list(one.shape) for one in _tensors(operator)}
    if choice is not None:
        read = [index for index, labels in enumerate(operator.loops.inputs) if labels is not None]
        for index, end in zip(read, choice.inputs, strict=True):
            for held, size in zip(end.value, mesh_shape, strict=True):
                if held >= 0 and index in shapes:
                    shapes[index][held] //= size
    return tuple(tuple(shapes[index]) for index in sorted(shapes))


def _tensors(operator: Operator) -> list[Tensor]:
    assert operator.call is not None
    found = {one.index: one for one in _leaves(operator) if isinstance(one, Tensor)}
    return [found[index] for index in sorted(found)]


def _leaves(operator: Operator) -> list[Any]:
    assert operator.call is not None
    leaves: list[Any] = pytree.tree_leaves((tuple(operator.call.args), dict(operator.call.kwargs)))
    return leaves


def _filled(operator: Operator, given: Callable[[Tensor], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Its arguments, with something in the place of each tensor."""
    assert operator.call is not None
    arguments = (tuple(operator.call.args), dict(operator.call.kwargs))
    filled: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(Tensor, given, arguments)
    return filled


def _text(operator: Operator, shapes: Shapes) -> str:
    """What operators have in common that take as long."""
    numbers = {one.index: number for number, one in enumerate(_tensors(operator))}
    wants = _wanted(operator)

    def say(one: Tensor) -> str:
        return f"{str(one.dtype).removeprefix('torch.')}{list(shapes[numbers[one.index]])}{wants[one.index]}"

    args, kwargs = _filled(operator, say)
    said = [str(one) for one in args] + [f"{key}={one}" for key, one in kwargs.items()]
    text = f"{operator.kind}({', '.join(said)})"
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        text += f" to {operator.makes[0].dtype}"
    return text


def _wanted(operator: Operator) -> dict[int, str]:
    """By tensor, which gradient backward makes of it: of an input, "'", of a parameter, '"', or none."""
    assert operator.call is not None
    out = {one.index: "" for one in _tensors(operator)}
    read = [index for index, labels in enumerate(operator.loops.inputs) if labels is not None]
    for index, value in zip(read, operator.reads, strict=True):
        if operator.requires_grad and value.requires_grad:
            out[index] = '"' if value.is_parameter else "'"
    return out


def _run(operator: Operator, shapes: Shapes, device: torch.device) -> Times:
    """Runs it on random numbers; indices are small enough for any dim."""
    assert operator.call is not None
    wants = _wanted(operator)
    tensors = dict(zip((one.index for one in _tensors(operator)), _tensors(operator), strict=True))
    most = min((size for shape in shapes for size in shape), default=1)
    made: dict[int, torch.Tensor] = {}
    for one, shape in zip(tensors.values(), shapes, strict=True):
        if one.dtype.is_floating_point or one.dtype.is_complex:
            made[one.index] = torch.randn(shape, dtype=one.dtype, device=device)
        elif one.dtype == torch.bool:
            made[one.index] = torch.ones(shape, dtype=one.dtype, device=device)
        else:
            made[one.index] = torch.randint(max(most, 1), shape, dtype=one.dtype, device=device)
        made[one.index].requires_grad_(bool(wants[one.index]))
    args, kwargs = _filled(operator, lambda one: made[one.index])
    target = operator.call.function
    function = target if callable(target) else lambda first, *more, **named: getattr(first, target)(*more, **named)
    with torch.enable_grad():
        forward = least_seconds(lambda: function(*args, **kwargs), device, _RUNS, _ENOUGH_SECONDS)
        results = pytree.tree_leaves(function(*args, **kwargs))
        outputs = [one for one in results if isinstance(one, torch.Tensor) and one.requires_grad]
        gradients = [torch.ones_like(one) for one in outputs]
        of_kind = [[made[index] for index, kind in wants.items() if kind == own] for own in ("'", '"')]

        def back(leaves: list[torch.Tensor]) -> float:
            if not leaves or not outputs:
                return 0.0

            def run() -> object:
                return torch.autograd.grad(outputs, leaves, gradients, retain_graph=True, allow_unused=True)

            return least_seconds(run, device, _RUNS, _ENOUGH_SECONDS)

        return forward, back(of_kind[0]), back(of_kind[1])
