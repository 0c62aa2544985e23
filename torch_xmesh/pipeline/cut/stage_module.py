"""One stage's graph out of the model's, and the module that runs it."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from torch_xmesh.pipeline.capture.node_forms import expecter
from torch_xmesh.pipeline.capture.regions import autocasts, enter_modes, exit_modes
from torch_xmesh.pipeline.cut.graph_cut import GraphCut

_DEVICE = "_xmesh_stage_device"


class StageBuilder:
    """Builds the graph of one stage."""

    def __init__(self, cut: GraphCut, stage: int, names: Mapping[fx.Node, str]) -> None:
        self._cut, self._stage, self._names = cut, stage, names
        self._graph = fx.Graph()
        self._here: dict[fx.Node, fx.Node] = {}

    def build(self, inputs: Sequence[str], outputs: Iterable[fx.Node]) -> fx.Graph:
        """The graph: placeholders for the `inputs` by name, then the stage's nodes, then the tuple of `outputs`."""
        cut = self._cut
        known = {self._names[node]: node for node in cut.needs[self._stage].received}
        taken: set[str] = set()
        for position, name in enumerate(inputs):
            word = re.sub(r"\W", "_", name)
            word = f"{word}_{position}" if word in taken else word
            taken.add(word)
            placeholder = self._graph.placeholder(word)
            if name in known:
                self._here[known[name]] = placeholder
        for node in list(self._here):
            if cut.changed_in(node, self._stage):
                self._refuse_shared_change(node)
                self._here[node] = self._graph.call_method("clone", (self._here[node],))
        self._copy(sorted(cut.needs[self._stage].again, key=lambda node: cut.order[node]))
        self._copy(cut.nodes_of(self._stage))
        self._graph.output(tuple(self._here[node] for node in outputs))
        return self._graph

    def _copy(self, nodes: list[fx.Node]) -> None:
        modes, token = None, None
        for node in nodes:
            wanted = None if node.op == "get_attr" else node.meta["modes"]
            if wanted != modes:
                if token is not None:
                    self._graph.call_function(exit_modes, (token,))
                token = None if wanted is None else self._graph.call_function(enter_modes, wanted)
                modes = wanted
            if node.op == "get_attr" and str(node.target) in self._cut.recording.constants:
                constant = self._cut.recording.constants[str(node.target)]
                reader = _constant_reader(str(node.target), constant)
                arguments = (self._device(),) if isinstance(constant, torch.Tensor) else ()
                self._here[node] = self._graph.call_function(reader, arguments)
                continue
            args, kwargs = self._placed(fx.node.map_arg((node.args, node.kwargs), lambda source: self._here[source]))
            self._here[node] = self._graph.create_node(node.op, node.target, args, kwargs, node.name)
            self._here[node].meta["source"] = node.meta["source"]
            if "expects" in node.meta:
                expect = expecter(str(node.target), node.meta["expects"])
                self._here[node] = self._graph.call_function(expect, (self._here[node],))
        if token is not None:
            self._graph.call_function(exit_modes, (token,))

    def _placed(self, arguments: Any) -> Any:
        """A node's arguments, in which the device that the forward was recorded on is the stage's."""
        recorded = self._cut.recording.device

        def change(value: Any) -> Any:
            return self._device() if isinstance(value, torch.device) and value == recorded else value

        return fx.node.map_aggregate(arguments, change)

    def _device(self) -> fx.Node:
        return self._graph.get_attr(_DEVICE)

    def _refuse_shared_change(self, node: fx.Node) -> None:
        cut = self._cut
        at = f" at {node.meta['source']}" if node.meta["source"] else ""
        for stage, needs in enumerate(cut.needs):
            for other in needs.received:
                if (stage, other) != (self._stage, node) and stage >= self._stage and cut.shares_memory(other, node):
                    raise ValueError(
                        f"stage {self._stage} changes {self._names[node]} (made by node {node.name}{at}) in place, and "
                        f"stage {stage} reads {self._names[other]} in the same memory: across stages the change would "
                        "be lost; use the out-of-place operation"
                    )


def _constant_reader(name: str, value: Any) -> Callable[..., Any]:
    """Gives a constant, of a tensor always the same one on a device."""
    on_device: dict[torch.device, torch.Tensor] = {}

    def read(device: torch.device | None = None) -> Any:
        if device is None or value.device == device:
            return value
        if device not in on_device:
            on_device[device] = value.to(device)
        return on_device[device]

    read.__name__ = read.__qualname__ = name
    return read


def _held(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that call or read what the model has, calls first."""
    called = [node for node in graph.nodes if node.op == "call_module"]
    return [*called, *(node for node in graph.nodes if node.op == "get_attr" and node.target != _DEVICE)]


class StageCode:
    """What a stage runs for inputs of certain sizes, in one mode.

    Attributes:
        graph: as torch.fx has it.
        uses_rng: it may draw random numbers.
        has_gradients: it was recorded with gradients enabled.
        device: on which it was recorded; graphs name that of the stage.
        way: what the model read of its inputs' values, in words that are the same on every rank.
        situation: that in which it is run, as Ways have it.
    """

    def __init__(
        self,
        graph: fx.Graph,
        *,
        uses_rng: bool,
        has_gradients: bool,
        device: torch.device,
        way: str,
        situation: str,
    ) -> None:
        self.graph, self.uses_rng, self.has_gradients, self.way = graph, uses_rng, has_gradients, way
        self.device = device
        self.situation = situation
        self._function: Callable[..., Any] | None = None

    @functools.cached_property
    def targets(self) -> frozenset[str]:
        """Names of what of the model it calls and reads."""
        return frozenset(str(node.target) for node in _held(self.graph))

    def __call__(self, module: nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Runs it on a stage's module."""
        if self._function is None:
            code = self.graph.python_code("self")
            self._function = fx.graph_module._forward_from_src(code.src, code.globals)
        result: tuple[torch.Tensor, ...] = self._function(module, *inputs)
        return result


class StageModule(nn.Module):
    """A stage: what its graph calls and reads, under the model's names. Runs the code that was chosen last."""

    def __init__(self, code: StageCode, training: bool) -> None:
        super().__init__()
        self.training = training
        self.on_device(code.device)
        self.chosen = code
        self.looked_into: list[nn.Module] = []  # the modules that hold others of the stage
        self._ran: dict[Any, set[StageCode]] = {}  # by shapes, mode and autocast

    def on_device(self, device: torch.device) -> None:
        """From now on it makes tensors there, where it was recorded before."""
        setattr(self, _DEVICE, device)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Input values in order to output values in order."""
        code = self.chosen
        if code.has_gradients and not torch.compiler.is_compiling():
            situation = (*(tensor.shape for tensor in inputs), self.training, autocasts())
            if torch._C._current_graph_task_id() == -1:
                self._ran.setdefault(situation, set()).add(code)
            else:
                code = self._again(situation)
        return code(self, inputs)

    @property
    def mode(self) -> bool | None:
        """Training or not, of the stage and of the modules that were looked into; None where they differ."""
        same = all(module.training == self.training for module in self.looked_into)
        return self.training if same else None

    def forget(self) -> None:
        """No checkpoint around the stage will run again what ran till now."""
        self._ran.clear()

    def _again(self, situation: Any) -> StageCode:
        """What a checkpoint around the whole stage runs in its backward: others may have been chosen since."""
        ran = self._ran[situation]
        if len(ran) > 1:
            raise RuntimeError(
                "a checkpoint around a whole stage cannot know which way the model took, which depends on values of "
                "its inputs: checkpoint modules inside of the stage"
            )
        return next(iter(ran))


class ModuleElsewhere(nn.Module):
    """Stands for the module of a stage that other ranks have: its parameters' names and shapes, on meta."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.training = module.training
        for name, parameter in module.named_parameters():
            *parents, field = name.split(".")
            place: nn.Module = self
            for parent in parents:
                if parent not in place._modules:
                    place.add_module(parent, nn.Module())
                place = place.get_submodule(parent)
            place.register_parameter(field, nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad))


def stage_module(model: nn.Module, code: StageCode) -> StageModule:
    """A module that runs `code` and shares, under the model's names, what it calls and reads."""
    module = StageModule(code, model.training)
    for node in _held(code.graph):
        _install(module, model, str(node.target))
    return module


def _install(module: StageModule, model: nn.Module, target: str) -> None:
    *parents, field = target.split(".")
    source: Any = model
    place: Any = module
    for name in parents:
        source = getattr(source, name)
        held = getattr(place, name, None)
        if held is source:
            return
        if held is None:
            held = nn.Module()
            held.training = getattr(source, "training", model.training)
            setattr(place, name, held)
            module.looked_into.append(held)
        place = held
    value = getattr(source, field)
    if isinstance(value, torch.Tensor) and field in getattr(source, "_buffers", {}):
        place.register_buffer(field, value, persistent=field not in source._non_persistent_buffers_set)
    else:
        setattr(place, field, value)
