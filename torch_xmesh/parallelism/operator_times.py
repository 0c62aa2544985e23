"""What operators take on the device at hand: each is measured once, with the sizes that a device has of it.

operator, its choice --> sizes on a device --> its key --> the table, or a run on random numbers --> seconds
"""

import dataclasses
import functools
import json
import math
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xmesh.arguments import read_text
from torch_xmesh.parallelism.compute import Compute, ComputeSeconds, least_seconds
from torch_xmesh.parallelism.loops import Choice, num_devices_used
from torch_xmesh.parallelism.operators import Operator
from torch_xmesh.parallelism.rows.registry import Tensor

_VERSION = 1
_RATED = frozenset("contiguous clone reshape flatten one_hot".split())
"""Kinds that take what rates say: copies, which depend on how what they are given lies in memory, and what depends on
values."""
_RUNS, _ENOUGH_SECONDS = 5, 0.1
"""An operator is run so often, and no more once that has taken so long."""

Times = tuple[float, float, float]
"""Seconds of a forward, of its inputs' gradients, and of its parameters' gradients."""
Shapes = tuple[tuple[int, ...], ...]
"""Shapes of the tensors among an operator's arguments, on a device."""


@dataclasses.dataclass(frozen=True, eq=False)
class OperatorTimes(Compute):
    """Measured times of operators, in place of one rate for all: small matrix products are slower than large ones, and
    kernels differ.

    An operator is measured when a search first asks for it, with the shapes that a device has of it. Measuring takes
    time, which counts against `max_seconds`, and the memory of the largest operator. Two processes measure different
    times and would make different plans, so let one measure and save them, and all load that file. Give hosts that are
    alike the same object.

    Made by its `measured` and `load`.

    Attributes:
        flops, bytes_per_s: rates for all that is not measured by itself: copies, operators that change tensors in
            place, experts of a mixture, operators under an autocast of the model's own, stages of unlike devices, and,
            without a `device`, what is not in the table.
        device: the device on which operators are measured; None: only those in the table are known.
        machine: the machine on which the table was measured.
        table: seconds by operator: (forward, inputs' gradients, parameters' gradients).
    """

    device: str | None = None
    machine: str = ""
    table: dict[str, Times] = dataclasses.field(default_factory=dict, repr=False)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @classmethod
    def measured(cls, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> "OperatorTimes":
        """Measures the device's rates now, and each operator when a search first asks for it."""
        rates = Compute.measured(dtype, device)
        return cls(rates.flops, rates.bytes_per_s, str(device), _machine(device))

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str | None = None) -> "OperatorTimes":
        """Reads a file that :meth:`save` has written. With a `device`, operators that it lacks are measured there.

        Raises:
            ValueError: the file was not written by :meth:`save`, or was measured on another machine than that of
                `device`.
        """
        text = read_text(path, "times of operators")
        try:
            fields = json.loads(text)
            if fields["version"] != _VERSION:
                raise ValueError(f"version {fields['version']!r}")
            table = {str(key): _times(times) for key, times in fields["operators"].items()}
            name = None if device is None else str(device)
            out = cls(fields["flops"], fields["bytes_per_s"], name, str(fields["machine"]), table)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} has no times of operators: {type(error).__name__}: {error}") from None
        if device is not None and out.machine != _machine(device):
            raise ValueError(f"{path} was measured on {out.machine}, this is {_machine(device)}")
        return out

    def save(self, path: str | Path) -> None:
        """Writes the rates and the times known so far to a JSON file.

        Raises:
            OSError: it cannot be written.
        """
        fields = {
            "version": _VERSION,
            "flops": self.flops,
            "bytes_per_s": self.bytes_per_s,
            "machine": self.machine,
            "operators": {key: times for key, times in sorted(self.table.items()) if not math.isnan(times[0])},
        }
        Path(path).write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")

    def describe(self) -> str:
        known = sum(not math.isnan(times[0]) for times in self.table.values())
        return f"as measured ({known} of them), others {super().describe()}"

    def kind_of(self, operator: Operator) -> tuple[object, ...]:
        return () if operator.call is None or not _is_alone(operator) else (operator.call.text,)

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
            self.table[key] = _run(operator, shapes, torch.device(self.device)) or (math.nan,) * 3
        found = self.table.get(key)
        return None if found is None or math.isnan(found[0]) else found


def _times(given: Any) -> Times:
    forward, inputs, weights = (float(number) for number in given)
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in (forward, inputs, weights)):
        raise ValueError(f"seconds are positive numbers, got {given}")
    return forward, inputs, weights


def _is_alone(operator: Operator) -> bool:
    """Whether it can be called by itself: a function that computes something and leaves what it is given as it is."""
    is_rated = operator.kind in _RATED or operator.is_constant or operator.views
    return operator.call is not None and not is_rated


def _shapes(operator: Operator, choice: Choice | None, mesh_shape: Sequence[int]) -> Shapes:
    """Shapes of the tensors among an operator's arguments: those of a device's parts, or the whole ones without a
    choice."""
    assert operator.call is not None
    shapes = {tensor.index: list(tensor.shape) for tensor in _tensors(operator)}
    if choice is not None:
        read = [index for index, labels in enumerate(operator.loops.inputs) if labels is not None]
        for index, end in zip(read, choice.inputs, strict=True):
            for held, size in zip(end.value, mesh_shape, strict=True):
                if held >= 0 and index in shapes:
                    shapes[index][held] //= size
    return tuple(tuple(shapes[index]) for index in sorted(shapes))


def _tensors(operator: Operator) -> list[Tensor]:
    """By index, each once."""
    assert operator.call is not None
    found = {tensor.index: tensor for tensor in operator.call.tensors}
    return [found[index] for index in sorted(found)]


def _filled(operator: Operator, given: Callable[[Tensor], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Its arguments, with something in the place of each tensor."""
    assert operator.call is not None
    arguments = (tuple(operator.call.args), dict(operator.call.kwargs))
    filled: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(Tensor, given, arguments)
    return filled


def _machine(device: torch.device | str) -> str:
    """A device in words, with all that decides how fast torch is on it."""
    on_device = torch.device(device)
    what = f"{platform.machine()} with {torch.get_num_threads()} threads"
    if on_device.type == "cuda":
        what = torch.cuda.get_device_name(on_device)
    return f"{on_device.type} {what}, torch {torch.__version__}"


def _text(operator: Operator, shapes: Shapes) -> str:
    """What operators have in common that take as long; what numbers they scale by does not count."""
    numbers = {tensor.index: number for number, tensor in enumerate(_tensors(operator))}
    wants = _wanted(operator)

    def say(tensor: Tensor) -> str:
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(shapes[numbers[tensor.index]])}{wants[tensor.index]}"

    args, kwargs = pytree.tree_map_only(float, lambda _: "float", _filled(operator, say))
    said = [str(argument) for argument in args] + [f"{key}={argument}" for key, argument in kwargs.items()]
    return f"{operator.kind}({', '.join(said)}) -> {str(operator.makes[0].dtype).removeprefix('torch.')}"


def _wanted(operator: Operator) -> dict[int, str]:
    """By tensor, which gradient backward makes of it: of an input, "'", of a parameter, '"', or none."""
    assert operator.call is not None
    out = {tensor.index: "" for tensor in _tensors(operator)}
    read = [index for index, labels in enumerate(operator.loops.inputs) if labels is not None]
    for index, value in zip(read, operator.reads, strict=True):
        if operator.requires_grad and value.requires_grad:
            out[index] = '"' if value.is_parameter else "'"
    return out


def _run(operator: Operator, shapes: Shapes, device: torch.device) -> Times | None:
    """Runs it on random numbers between 0 and 1, and on indices that are small enough for any dim; None where it cannot
    be run so, or changes what it is given."""
    assert operator.call is not None
    wants = _wanted(operator)
    most = max(1, min((size for shape in shapes for size in shape), default=1))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        made: dict[int, torch.Tensor] = {}
        for tensor, shape in zip(_tensors(operator), shapes, strict=True):
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                made[tensor.index] = torch.rand(shape, dtype=tensor.dtype, device=device)
            elif tensor.dtype == torch.bool:
                made[tensor.index] = torch.ones(shape, dtype=tensor.dtype, device=device)
            else:
                made[tensor.index] = torch.randint(most, shape, dtype=tensor.dtype, device=device)
            made[tensor.index].requires_grad_(bool(wants[tensor.index]))
        arguments = _filled(operator, lambda tensor: made[tensor.index])
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: device, arguments)
        of_kind = [[made[index] for index, kind in wants.items() if kind == own] for own in ("'", '"')]
        target = operator.call.function
        function = target if callable(target) else lambda first, *more, **named: getattr(first, target)(*more, **named)
        with torch.enable_grad():
            return _timed(lambda: function(*args, **kwargs), list(made.values()), of_kind, device)


def _timed(
    call: Callable[[], Any], given: list[torch.Tensor], leaves: list[list[torch.Tensor]], device: torch.device
) -> Times | None:
    """`leaves`: of which gradients are made together."""
    versions = [tensor._version for tensor in given]

    def back(wanted: list[torch.Tensor]) -> object:
        return torch.autograd.grad(outputs, wanted, gradients, retain_graph=True, allow_unused=True)

    try:
        results = pytree.tree_leaves(call())
        outputs = [tensor for tensor in results if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
        gradients = [torch.ones_like(output) for output in outputs]
        runs: list[Callable[[], object] | None] = [call]
        for wanted in leaves:
            runs.append(functools.partial(back, wanted) if wanted and outputs else None)
            if runs[-1] is not None:
                runs[-1]()
    except (RuntimeError, ValueError, IndexError, AssertionError, TypeError):  # with these sizes it makes no sense
        return None
    if versions != [tensor._version for tensor in given]:
        return None
    forward, inputs, weights = (
        0.0 if run is None else least_seconds(run, device, _RUNS, _ENOUGH_SECONDS) for run in runs
    )
    return forward, inputs, weights
