"""A recording, cut: which node runs in which stage, what each stage needs from elsewhere."""

import dataclasses
from collections.abc import Callable

from torch import fx
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.capture.recording import Recording, nodes_behind, structure_of


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

    def targets_of(self, stage: int) -> set[str]:
        """What of the model a stage calls and reads, by name."""
        nodes = (*self.nodes_of(stage), *self.needs[stage].again)
        named = {str(node.target) for node in nodes if node.op in ("call_module", "get_attr")}
        return named - set(self.recording.constants)

    def is_local(self, node: fx.Node, stage: int) -> bool:
        return self.home[node] == stage or node in self.needs[stage].again

    def changed_in(self, node: fx.Node, stage: int) -> bool:
        """Whether the stage changes a tensor that it receives, in place."""
        return stage in self._changed_in.get(node, ())

    def changed_tensors(self) -> dict[str, int]:
        """The first stage that changes a buffer or a parameter, by its name."""
        return {name: self.home[node] or 0 for name, node in self.recording.changed_tensors.items()}

    def draws_random_numbers(self, stage: int) -> bool:
        return any(self.recording.facts[node].draws for node in (*self.nodes_of(stage), *self.needs[stage].again))

    def shares_memory(self, node: fx.Node, other: fx.Node) -> bool:
        return bool(self.recording.facts[node].memory & self.recording.facts[other].memory)

    def guard_inputs(self) -> list[fx.Node]:
        """The placeholders from which follows what was read of tensors' values."""
        behind = {source for guard in self.recording.guards for node in guard.nodes for source in nodes_behind(node)}
        return [node for node in self.recording.graph.nodes if node.op == "placeholder" and node in behind]

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
