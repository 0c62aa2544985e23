"""What module calls take and keep: measured, call by call."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from torch_xmesh.generators import rng_kept
from torch_xmesh.pipeline.capture.library_models import without_caches
from torch_xmesh.pipeline.capture.node_forms import tensors_of
from torch_xmesh.pipeline.capture.opened import check_opened, opened_modules
from torch_xmesh.pipeline.capture.recorded import RecordedModel, stand_ins
from torch_xmesh.pipeline.capture.recording import Recording
from torch_xmesh.pipeline.capture.regions import enter_modes
from torch_xmesh.pipeline.capture.sandbox import Sandbox, hooks_off
from torch_xmesh.pipeline.cut.partition_parts import input_names
from torch_xmesh.pipeline.cut.profile_memory import KeptMeter, NodeMemory, Read, UnitCost

_Figure = TypeVar("_Figure")
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Profile:
    """Costs per module call of a model; modules are opened, where that can be captured, for finer ones.

    Attributes:
        units: one per first call of a module; other nodes belong to the call before them.
    """

    def __init__(self, model: nn.Module, arguments: _Arguments, specs: Sequence[Any], repeats: int) -> None:
        self._model, self._arguments, self._specs = model, arguments, specs
        without_caches(model)
        device = next(
            (parameter.device for parameter in model.parameters() if not parameter.is_meta), torch.device("cpu")
        )
        names = [name for name, _ in input_names(model, arguments)]
        self._recorded = RecordedModel(model, arguments, names=names, opened=frozenset(), batch=(), device=device)
        self._on_meta = any(parameter.is_meta for parameter in model.parameters())
        self._repeats = 1 if self._on_meta else repeats
        self._opened, self._closed = frozenset({""}), set[str]()
        self._measure(self._record(self._opened))

    def _record(self, opened: frozenset[str]) -> Recording:
        self._recorded.opened = opened
        examples = [leaf for leaf in pytree.tree_leaves(self._arguments) if isinstance(leaf, torch.Tensor)]
        return self._recorded.record(stand_ins(examples, self._recorded.device), self._model.training)

    def refine(self, num_stages: int) -> None:
        """Opens modules until none takes half a stage's share of the time."""
        is_finer = True
        while is_finer:
            share = sum(unit.seconds for unit in self.units) / num_stages
            is_finer = self.open([unit.name for unit in self.units if unit.seconds > share / 2])

    def open(self, names: Sequence[str]) -> bool:
        """Looks into modules from now on; False if none of them can be opened."""
        large = [n for n in names if n not in self._closed and _can_open(self._model.get_submodule(n))]
        if not large:
            return False
        before = self._opened
        for name in large:
            trial = self._opened | {name} | opened_modules([name])
            try:
                check_opened(self._model, trial)
                self._record(trial)
            except ValueError:
                self._closed.add(name)
                continue
            self._opened = trial
        self._closed.update(large)
        if self._opened == before:
            return False
        self._measure(self._record(self._opened))
        return True

    def units_with_memory(self) -> list[UnitCost]:
        """The same, with what they hold."""
        memory = self._walk(lambda inputs: _kept_meter(self._model, self._traced, inputs))
        parameters: list[dict[int, int]] = [{} for _ in self.units]
        kept: list[dict[int, int]] = [{} for _ in self.units]
        reads: list[dict[str, Read]] = [{} for _ in self.units]
        for node, found in memory.items() if self.units else ():
            unit = self._unit_of[node]
            for parameter in _parameters_of(self._model, self._traced, node):
                parameters[unit][id(parameter)] = parameter.numel() * parameter.element_size()
            kept[unit].update(found.kept)
            self._add_reads(reads[unit], unit, node.all_input_nodes, memory)
        if self.units:  # the last stage hands the model's outputs through
            outputs = [leaf for leaf in pytree.tree_leaves(self._traced.output) if isinstance(leaf, fx.Node)]
            self._add_reads(reads[-1], len(self.units) - 1, outputs, memory)
        return [
            dataclasses.replace(unit, parameters=parameters[index], kept=kept[index], reads=reads[index])
            for index, unit in enumerate(self.units)
        ]

    def _add_reads(
        self, reads: dict[str, Read], unit: int, nodes: Sequence[fx.Node], memory: Mapping[fx.Node, NodeMemory]
    ) -> None:
        for node in nodes:
            if node in memory and self._unit_of[node] != unit:
                reads[node.name] = Read(self._unit_of[node], memory[node].storages, memory[node].num_bytes)

    def _measure(self, captured: Recording) -> None:
        self._traced = captured
        meter = _count_operations if self._on_meta else _measure
        runs = [self._walk(lambda inputs: meter) for _ in range(self._repeats)]
        self._unit_of: dict[fx.Node, int] = {}
        names: dict[str, float] = {}
        begun, known = set[str](), {name for name, _ in self._model.named_modules(remove_duplicate=False)} - {""}
        for node in captured.graph.nodes:
            owner = next((path for path in reversed(node.meta["modules"]) if path in known), None)
            if owner is not None and owner not in begun and node.op == "call_module":
                names[owner] = 0.0
            begun |= opened_modules(f"{path}.*" for path in node.meta["modules"])
            self._unit_of[node] = max(0, len(names) - 1)
        listed = list(names)
        for node in runs[0] if names else ():
            names[listed[self._unit_of[node]]] += min(run[node] for run in runs)
        self.units = [UnitCost(name, seconds) for name, seconds in names.items()]

    def _walk(self, make_meter: Callable[[list[torch.Tensor]], "_Meter[_Figure]"]) -> dict[fx.Node, _Figure]:
        """A figure per node that computes; buffers, gradients and random state are kept."""
        model = self._model
        examples = tensors_of(self._arguments)
        if self._on_meta:
            with Sandbox(model) as sandbox:
                inputs = [sandbox.fake(example) for example in examples]
                return _walk(model, self._traced, inputs, make_meter(inputs))
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        real = [torch.zeros(e.shape, dtype=e.dtype, device=device) if e.is_meta else e.detach() for e in examples]
        kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        try:
            with hooks_off(model), rng_kept(device):
                return _walk(model, self._traced, real, make_meter(real))
        finally:
            with torch.no_grad():
                for buffer, value in kept:
                    buffer.copy_(value)


def _can_open(module: nn.Module) -> bool:
    library = type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential)
    return not library and any(True for _ in module.children())


def _attribute(model: nn.Module, captured: Recording, node: fx.Node) -> Any:
    """What a get_attr node reads."""
    value = captured.constants.get(str(node.target))
    if value is None:
        parent, _, field = str(node.target).rpartition(".")
        value = getattr(model.get_submodule(parent), field)
    return value


def _parameters_of(model: nn.Module, captured: Recording, node: fx.Node) -> Iterator[nn.Parameter]:
    """The parameters that a node reads."""
    read = [_attribute(model, captured, source) for source in node.all_input_nodes if source.op == "get_attr"]
    if node.op == "call_module":
        read.append(model.get_submodule(str(node.target)))
    for value in read:
        if isinstance(value, nn.Module):
            yield from value.parameters()
        elif isinstance(value, nn.Parameter):
            yield value


@dataclasses.dataclass(frozen=True)
class _Call:
    """A node that computes: `run` it on `copies` of the values `given` by others; gradients flow into `leaves`."""

    run: Callable[[], Any]
    leaves: list[torch.Tensor]
    given: list[Any]
    copies: list[Any]


_Meter = Callable[[_Call], tuple[Any, _Figure]]


def _walk(
    model: nn.Module, captured: Recording, inputs: list[torch.Tensor], meter: _Meter[_Figure]
) -> dict[fx.Node, _Figure]:
    environment: dict[fx.Node, Any] = {}
    remaining = iter(inputs)
    found = {}
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            environment[node] = next(remaining)
        elif node.op == "get_attr":
            environment[node] = _attribute(model, captured, node)
        else:
            given = [environment[source] for source in node.all_input_nodes]
            copies = pytree.tree_map_only(torch.Tensor, _input_of, given)
            local = dict(zip(node.all_input_nodes, copies, strict=True))
            module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
            leaves = tensors_of(copies) + (list(module.parameters()) if module is not None else [])
            leaves = [leaf for leaf in leaves if leaf.requires_grad]
            environment[node], found[node] = meter(_Call(_caller(node, module, local), leaves, given, copies))
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


def _measure(call: _Call) -> tuple[Any, float]:
    start = _now(call.leaves)
    value = call.run()
    outputs = [tensor for tensor in tensors_of(value) if tensor.requires_grad]
    if outputs and call.leaves:
        torch.autograd.grad(outputs, call.leaves, [torch.ones_like(output) for output in outputs], allow_unused=True)
    return value, _now(call.leaves) - start


def _now(leaves: list[torch.Tensor]) -> float:
    for kind in {leaf.device.type for leaf in leaves} - {"cpu", "meta"}:
        torch.get_device_module(kind).synchronize()
    return time.perf_counter()


def _count_operations(call: _Call) -> tuple[Any, float]:
    from torch.utils.flop_counter import FlopCounterMode  # brings Triton along: only who needs it imports it

    with FlopCounterMode(display=False) as counter:
        value = call.run()
    entries = sum(tensor.numel() for tensor in tensors_of(value))
    return value, float(3 * counter.get_total_flops() + 10 * entries)


def _kept_meter(model: nn.Module, captured: Recording, inputs: list[torch.Tensor]) -> _Meter[NodeMemory]:
    there = [*model.parameters(), *model.buffers(), *captured.constants.values(), *inputs]
    there += [value for module in model.modules() for value in vars(module).values()]
    meter = KeptMeter(tensor for tensor in there if isinstance(tensor, torch.Tensor))
    return lambda call: meter(call.run, call.given, call.copies)
