"""One stage's graph out of the model's: its own nodes, what it needs from elsewhere, and a module that runs it."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.cut.recording import Recording, structure_of
from torch_xmesh.pipeline.cut.regions import enter_modes, exit_modes


@dataclasses.dataclass
class Needs:
    """What a stage takes from outside: tensors, and nodes to compute again."""

    received: dict[fx.Node, None] = dataclasses.field(default_factory=dict)
    again: dict[fx.Node, None] = dataclasses.field(default_factory=dict)


class GraphCut:
    """A recording, cut: which node runs where, which tensors cross."""

    def __init__(
        self,
        recording: Recording,
        stage_of: Callable[[fx.Node], int],
        *,
        num_stages: int,
    ) -> None:
        self.recording, self.num_stages = recording, num_stages
        self.order = {node: position for position, node in enumerate(recording.graph.nodes)}
        self.home: dict[fx.Node, int | None] = {}
        for node in recording.graph.nodes:
            source = structure_of(node)
            own = None if node.op in ("placeholder", "get_attr") else stage_of(node)
            self.home[node] = own if source is None else self.home[source]
        self._changed_in = self._find_changes()
        changed = {key for node in self._changed_in for key in recording.facts[node].memory}
        self._changed_memory = changed
        self._again: dict[fx.Node, bool] = {}
        self.output_nodes = [leaf for leaf in pytree.tree_leaves(recording.output) if isinstance(leaf, fx.Node)]
        self._live = self._find_live()
        self.needs = [self._find_needs(stage) for stage in range(num_stages)]

    def nodes_of(self, stage: int) -> list[fx.Node]:
        return [node for node in self.recording.graph.nodes if self.home[node] == stage and node in self._live]

    def is_local(self, node: fx.Node, stage: int) -> bool:
        return self.home[node] == stage or node in self.needs[stage].again

    def changed_in(self, node: fx.Node, stage: int) -> bool:
        """Whether the stage changes a tensor that it receives, in place."""
        return stage in self._changed_in.get(node, ())

    def changed_buffers(self) -> dict[str, int]:
        """The first stage that changes a buffer, by its name."""
        return {name: self.home[node] or 0 for name, node in self.recording.changed_buffers.items()}

    def draws_random_numbers(self, stage: int) -> bool:
        return any(self.recording.facts[node].draws for node in (*self.nodes_of(stage), *self.needs[stage].again))

    def shares_memory(self, one: fx.Node, other: fx.Node) -> bool:
        return bool(self.recording.facts[one].memory & self.recording.facts[other].memory)

    def guard_inputs(self) -> list[fx.Node]:
        """The placeholders from which follows what was read of tensors' values."""
        found: dict[fx.Node, None] = {}
        left = [node for guard in self.recording.guards for node in guard.nodes]
        seen = set(left)
        while left:
            node = left.pop()
            if node.op == "placeholder":
                found[node] = None
            more = [source for source in node.all_input_nodes if source not in seen]
            seen.update(more)
            left += more
        return list(found)

    def _find_changes(self) -> dict[fx.Node, set[int]]:
        found: dict[fx.Node, set[int]] = {}
        facts = list(self.recording.facts.items())
        for memory, count, by in self.recording.mutations:
            stage = self.home[by]
            for node, fact in facts[:count]:
                if memory in fact.memory and stage is not None:
                    found.setdefault(node, set()).add(stage)
        return found

    def _find_live(self) -> set[fx.Node]:
        """Nodes that the output needs, or that do something besides giving a result."""
        effects = {node for _, _, node in self.recording.mutations}
        live: set[fx.Node] = set(self.output_nodes)
        for node in reversed(self.recording.graph.nodes):
            fact = self.recording.facts[node]
            is_effect = node in effects or fact.draws or not fact.memory or node.op == "call_module"
            if node in live or (is_effect and node.op in ("call_module", "call_function", "call_method")):
                live.add(node)
                live.update(node.all_input_nodes)
        return live

    def _find_needs(self, stage: int) -> Needs:
        needs = Needs()
        for node in self.nodes_of(stage):
            for source in node.all_input_nodes:
                self._need(source, stage, needs)
        if stage == self.num_stages - 1:
            for node in self.output_nodes:
                self._need(node, stage, needs)
        needs.received = dict.fromkeys(sorted(needs.received, key=self.rank))
        return needs

    def rank(self, node: fx.Node) -> tuple[int, int]:
        """Inputs first, then by stage and order of execution."""
        home = self.home[node]
        return (-1 if home is None else home, self.order[node])

    def _need(self, node: fx.Node, stage: int, needs: Needs) -> None:
        if self.home[node] == stage or node in needs.again:
            return
        if node.op == "get_attr" or self._is_recomputable(node):
            for source in node.all_input_nodes:
                self._need(source, stage, needs)
            needs.again[node] = None
        else:
            needs.received[node] = None

    def _is_recomputable(self, node: fx.Node) -> bool:
        """Whether a node is computed again rather than sent: it follows from the model's inputs alone, or from buffers
        and constants, and every stage would find the same."""
        if node not in self._again:
            self._again[node] = self._is_same_everywhere(node)
        return self._again[node]

    def _is_same_everywhere(self, node: fx.Node) -> bool:
        fact = self.recording.facts[node]
        if fact.is_random or fact.memory & self._changed_memory or fact.requires_grad:
            return False
        if node.op == "get_attr":
            return True
        if node.op not in ("call_function", "call_method"):
            return False
        if any(source.op == "placeholder" for source in node.all_input_nodes) and not fact.is_real:
            return False
        return all(source.op == "placeholder" or self._is_recomputable(source) for source in node.all_input_nodes)


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
                reader = _constant_reader(str(node.target), self._cut.recording.constants[str(node.target)])
                self._here[node] = self._graph.call_function(reader)
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: self._here[one])
            self._here[node] = self._graph.create_node(node.op, node.target, args, kwargs, node.name)
            self._here[node].meta["source"] = node.meta["source"]
        if token is not None:
            self._graph.call_function(exit_modes, (token,))

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


def _constant_reader(name: str, value: Any) -> Callable[[], Any]:
    def read() -> Any:
        return value

    read.__name__ = read.__qualname__ = name
    return read


class StageCode:
    """What a stage runs for inputs of certain sizes, in one mode.

    Attributes:
        graph: as torch.fx has it.
        uses_rng: it may draw random numbers.
    """

    def __init__(self, graph: fx.Graph, uses_rng: bool) -> None:
        self.graph, self.uses_rng = graph, uses_rng
        self._function: Callable[..., Any] | None = None

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
        self.chosen = [code]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Input values in order to output values in order."""
        return self.chosen[0](self, inputs)


def stage_module(model: nn.Module, code: StageCode) -> StageModule:
    """A module that runs `code` and shares, under the model's names, what it calls and reads."""
    module = StageModule(code, model.training)
    for kind in ("call_module", "get_attr"):
        for node in code.graph.nodes:
            if node.op == kind:
                _install(module, model, str(node.target))
    return module


def _install(module: nn.Module, model: nn.Module, target: str) -> None:
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
        place = held
    value = getattr(source, field)
    if isinstance(value, torch.Tensor) and field in getattr(source, "_buffers", {}):
        place.register_buffer(field, value, persistent=field not in source._non_persistent_buffers_set)
    else:
        setattr(place, field, value)
