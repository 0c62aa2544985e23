"""Where stages should start: measured time per module call, balanced under each stage's memory."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from torch_xmesh.pipeline.microbatch import leaf_specs
from torch_xmesh.pipeline.partition import SplitAt, opened_modules, trace_model
from torch_xmesh.pipeline.partition_sandbox import Sandbox, hooks_off
from torch_xmesh.pipeline.partition_values import sorted_arguments
from torch_xmesh.pipeline.trace import Traced, enter_modes

_PARAMETER_COPIES = 4
"""Parameter, gradient and two optimizer states."""


@dataclasses.dataclass(frozen=True)
class UnitCost:
    """One module call with the operations that follow it up to the next: where a stage may start.

    Attributes:
        name: the module to start a stage at.
        seconds: forward and backward, measured; for a model on meta, a figure proportional to the operations.
        parameter_bytes, activation_bytes: for one microbatch.
    """

    name: str
    seconds: float
    parameter_bytes: int
    activation_bytes: int


def choose_split(
    model: nn.Module,
    example_args: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None,
    num_stages: int,
    *,
    memory_limit_bytes: int | None = None,
    microbatches_in_flight: int | None = None,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
    repeats: int = 3,
) -> SplitAt:
    """Split points that make the slowest stage as fast as possible.

    The figures are measured here, so another process may get another answer: agree on one.

    Args:
        memory_limit_bytes: per stage, for parameters with gradients and two optimizer states, and
            `microbatches_in_flight` (default: num_stages) microbatches' activations.

    Raises:
        ValueError: fewer module calls than stages, or no split keeps the limit.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages must be at least 1, got {num_stages}")
    if num_stages == 1:
        return SplitAt(())
    arguments = sorted_arguments(example_args, example_kwargs)
    specs = leaf_specs(arguments[0], args_chunk_spec, "args") + leaf_specs(arguments[1], kwargs_chunk_spec, "kwargs")
    units = _refined_costs(model, arguments, specs, num_stages, repeats)
    flight = num_stages if microbatches_in_flight is None else microbatches_in_flight
    starts = balance(units, num_stages, memory_limit_bytes, flight)
    return SplitAt(tuple(units[start].name for start in starts))


def balance(
    units: Sequence[UnitCost], num_stages: int, memory_limit_bytes: int | None, microbatches_in_flight: int
) -> list[int]:
    """The first unit of each stage but the first: minimises the slowest stage's seconds, then the sum of squares
    (exact, O(n^2 * stages)).

    Raises:
        ValueError: fewer units than stages, or no split keeps the limit.
    """
    count = len(units)
    if count < num_stages:
        raise ValueError(
            f"the model has {count} module calls at which a stage may start ({[u.name for u in units]}), fewer "
            f"than {num_stages} stages"
        )

    def cost(first: int, end: int) -> tuple[float, float] | None:
        part = units[first:end]
        needed = (
            sum(u.parameter_bytes for u in part) * _PARAMETER_COPIES
            + sum(u.activation_bytes for u in part) * microbatches_in_flight
        )
        if memory_limit_bytes is not None and needed > memory_limit_bytes:
            return None
        seconds = sum(u.seconds for u in part)
        return seconds, seconds * seconds

    best: dict[tuple[int, int], tuple[float, float, tuple[int, ...]]] = {(0, 0): (0.0, 0.0, ())}
    for stage in range(1, num_stages + 1):
        for end in range(stage, count + 1):
            options = []
            for first in range(stage - 1, end):
                before, own = best.get((stage - 1, first)), cost(first, end)
                if before is not None and own is not None:
                    options.append((max(before[0], own[0]), before[1] + own[1], (*before[2], first)))
            if options:
                best[stage, end] = min(options)
    if (num_stages, count) not in best:
        smallest = max(
            u.parameter_bytes * _PARAMETER_COPIES + u.activation_bytes * microbatches_in_flight for u in units
        )
        raise ValueError(
            f"no split into {num_stages} stages keeps memory_limit_bytes={memory_limit_bytes}: the largest single "
            f"module call needs {smallest} bytes, "
            "all together "
            f"{sum(u.parameter_bytes * _PARAMETER_COPIES + u.activation_bytes * microbatches_in_flight for u in units)}"
        )
    return list(best[num_stages, count][2][1:])


def _refined_costs(
    model: nn.Module, arguments: Any, specs: Sequence[Any], num_stages: int, repeats: int
) -> list[UnitCost]:
    """Costs per module call; modules are opened, where that can be traced, until none takes half a stage's share."""
    opened, closed = frozenset({""}), set[str]()
    units = _costs(model, trace_model(model, arguments, specs, opened), arguments, repeats)
    while True:
        share = sum(unit.seconds for unit in units) / num_stages
        large = [
            u.name
            for u in units
            if u.seconds > share / 2 and u.name not in closed and _can_open(model.get_submodule(u.name))
        ]
        if not large:
            return units
        for name in large:
            trial = opened | {name} | opened_modules([name])
            try:
                traced = trace_model(model, arguments, specs, trial)
                if traced.training is not None:
                    raise ValueError(f"{name} differs between train() and eval()")
            except ValueError:
                closed.add(name)
                continue
            opened = trial
        closed.update(large)
        units = _costs(model, trace_model(model, arguments, specs, opened), arguments, repeats)


def _can_open(module: nn.Module) -> bool:
    library = type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential)
    return not library and any(True for _ in module.children())


def _costs(model: nn.Module, traced: Traced, arguments: Any, repeats: int) -> list[UnitCost]:
    """One unit per first call of a module; other nodes belong to the call before them."""
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    measured = [_seconds_of_nodes(model, traced, arguments, on_meta) for _ in range(1 if on_meta else repeats)]
    units: list[UnitCost] = []
    seen: set[int] = set()
    started: set[str] = set()
    is_flat = all(node.op != "call_module" for node in traced.graph.nodes)
    for index, node in enumerate(traced.graph.nodes):
        seconds, activation = min(run[index][0] for run in measured), measured[0][index][1]
        owner = next((path for path in reversed(node.meta["modules"]) if path), None)
        if owner is not None and owner not in started and (node.op == "call_module" or is_flat):
            started.add(owner)
            units.append(UnitCost(owner, 0.0, 0, 0))
        held = [] if node.op not in ("call_module", "get_attr") else _new_tensors(model, traced, node, seen)
        size = sum(parameter.numel() * parameter.element_size() for parameter in held)
        if units:
            last = units[-1]
            units[-1] = UnitCost(
                last.name, last.seconds + seconds, last.parameter_bytes + size, last.activation_bytes + activation
            )
    return units


def _new_tensors(model: nn.Module, traced: Traced, node: fx.Node, seen: set[int]) -> Iterator[nn.Parameter]:
    if node.op == "call_module":
        candidates = list(model.get_submodule(str(node.target)).parameters())
    else:
        parent, _, field = str(node.target).rpartition(".")
        found = None if node.target in traced.constants else getattr(model.get_submodule(parent), field)
        candidates = [found] if isinstance(found, nn.Parameter) else []
    for parameter in candidates:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield parameter


def _seconds_of_nodes(model: nn.Module, traced: Traced, arguments: Any, on_meta: bool) -> list[tuple[float, int]]:
    """Seconds (forward and backward) and bytes made, per node; buffers, gradients and random state are kept."""
    examples = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    if on_meta:
        with Sandbox(model) as sandbox:
            return _walk(model, traced, [sandbox.fake(example) for example in examples], _count_operations)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    real = [torch.zeros(e.shape, dtype=e.dtype, device=device) if e.is_meta else e.detach() for e in examples]
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with hooks_off(model), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            return _walk(model, traced, real, _measure)
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


_Meter = Callable[[Callable[[], Any], list[torch.Tensor]], tuple[Any, float]]


def _walk(model: nn.Module, traced: Traced, inputs: list[torch.Tensor], meter: _Meter) -> list[tuple[float, int]]:
    environment: dict[fx.Node, Any] = {}
    remaining = iter(inputs)
    found = []
    for node in traced.graph.nodes:
        seconds = 0.0
        if node.op == "placeholder":
            value: Any = next(remaining)
        elif node.op == "get_attr":
            value = traced.constants.get(node.target)
            if value is None:
                parent, _, field = str(node.target).rpartition(".")
                value = getattr(model.get_submodule(parent), field)
        else:
            detached = pytree.tree_map_only(
                torch.Tensor, _input_of, [environment[source] for source in node.all_input_nodes]
            )
            local = dict(zip(node.all_input_nodes, detached, strict=True))
            module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
            leaves = [leaf for leaf in pytree.tree_leaves(detached) if isinstance(leaf, torch.Tensor)]
            leaves += list(module.parameters()) if module is not None else []
            value, seconds = meter(_caller(node, module, local), [leaf for leaf in leaves if leaf.requires_grad])
        environment[node] = value
        made = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        found.append(
            (seconds, 0 if node.op == "get_attr" else sum(leaf.numel() * leaf.element_size() for leaf in made))
        )
    return found


def _caller(node: fx.Node, module: nn.Module | None, local: dict[fx.Node, Any]) -> Callable[[], Any]:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: local[source])

    def call() -> Any:
        with enter_modes(*(node.meta["modes"] or (True, ()))):
            if module is not None:
                return module(*args, **kwargs)
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]

    return call


def _input_of(tensor: torch.Tensor) -> torch.Tensor:
    floating = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_().clone() if floating and tensor.requires_grad else tensor.detach()


def _measure(call: Callable[[], Any], leaves: list[torch.Tensor]) -> tuple[Any, float]:
    start = _now(leaves)
    value = call()
    outputs = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if outputs and leaves:
        torch.autograd.grad(outputs, leaves, [torch.ones_like(output) for output in outputs], allow_unused=True)
    return value, _now(leaves) - start


def _now(leaves: list[torch.Tensor]) -> float:
    if any(leaf.is_cuda for leaf in leaves):
        torch.cuda.synchronize()
    return time.perf_counter()


def _count_operations(call: Callable[[], Any], leaves: list[torch.Tensor]) -> tuple[Any, float]:
    with FlopCounterMode(display=False) as counter:
        value = call()
    entries = sum(leaf.numel() for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return value, float(3 * counter.get_total_flops() + 10 * entries)
