"""One stage's graph out of the model's: its own nodes, what it needs from elsewhere, and a module that holds it."""

import dataclasses
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.cut.capture import RANDOM_FACTORIES, Captured, by_mode, enter_modes, exit_modes
from torch_xmesh.pipeline.cut.propagate import Affine, Constant, NodeInfo, Propagation, TensorInfo
from torch_xmesh.pipeline.cut.stage_numbers import Numbers, is_literal

_RANDOM_WORDS = (*RANDOM_FACTORIES, "dropout", "uniform", "exponential", "multinomial", "gumbel", "poisson")
_SHAPE_ONLY = frozenset(
    f"{prefix}{kind}{suffix}"
    for kind in ("zeros", "ones", "full", "empty")
    for prefix, suffix in (("new_", ""), ("", "_like"))
)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A tensor of the graph: leaf `index` of what `node` returns."""

    node: fx.Node
    index: int


@dataclasses.dataclass
class Needs:
    """What a stage takes from outside: tensors, nodes to compute again, integers to derive from the batch size."""

    leaves: dict[Leaf, None] = dataclasses.field(default_factory=dict)
    again: dict[fx.Node, None] = dataclasses.field(default_factory=dict)
    integers: dict[fx.Node, None] = dataclasses.field(default_factory=dict)


class GraphCut:
    """The model's graph, cut: which node runs where, which tensors cross."""

    def __init__(
        self, captured: Captured, propagation: Propagation, stage_of: Callable[[fx.Node], int], num_stages: int
    ) -> None:
        self.captured, self.info, self.num_stages = captured, propagation.info, num_stages
        self._propagation = propagation
        self.order = {node: position for position, node in enumerate(captured.graph.nodes)}
        self.home: dict[fx.Node, int | None] = {}
        for node in captured.graph.nodes:
            self.home[node] = None if node.op in ("placeholder", "get_attr") else stage_of(node)
            source = node.args[0] if node.target is operator.getitem else None
            if (
                isinstance(source, fx.Node)
                and source.op != "placeholder"
                and self.info[source].has_tensors
                and not self.info[source].is_leaf
            ):
                self.home[node] = self.home[source]
        changed = set(propagation.changed_in)
        self._changed_memory = {key for node in changed for key in propagation.aliases[node]}
        self._again: dict[fx.Node, bool] = {}
        self._depending = self._find_depending()
        self.output_leaves = [leaf for leaf in pytree.tree_leaves(captured.output) if isinstance(leaf, fx.Node)]
        self.needs = [self._find_needs(stage) for stage in range(num_stages)]
        self.numbers = Numbers(self.info)

    def nodes_of(self, stage: int) -> list[fx.Node]:
        return [node for node in self.captured.graph.nodes if self.home[node] == stage]

    def is_local(self, node: fx.Node, stage: int) -> bool:
        return self.home[node] == stage or node in self.needs[stage].again

    def leaves_of(self, node: fx.Node) -> list[Leaf]:
        return [Leaf(node, index) for index, leaf in enumerate(self.info[node].leaves) if isinstance(leaf, TensorInfo)]

    def tensor(self, leaf: Leaf) -> TensorInfo:
        info = self.info[leaf.node].leaves[leaf.index]
        assert isinstance(info, TensorInfo)
        return info

    def changed_in(self, leaf: Leaf, stage: int) -> bool:
        """Whether the stage changes a tensor that it receives, in place."""
        return stage in self._propagation.changed_in.get(leaf.node, ())

    def shares_memory(self, one: fx.Node, other: fx.Node) -> bool:
        return bool(self._propagation.aliases[one] & self._propagation.aliases[other])

    def depends_on_samples(self, node: fx.Node) -> bool:
        """Whether the values of a node's tensors follow from those of an input that is cut into microbatches."""
        return node in self._depending

    def _find_depending(self) -> set[fx.Node]:
        found: set[fx.Node] = set()
        for node in self.captured.graph.nodes:
            if node.op == "placeholder":
                sizes = [size for leaf in self.leaves_of(node) for size in self.tensor(leaf).sizes]
                depends = self._propagation.fixed_batch or any(size.per_sample > 0 for size in sizes)
            elif getattr(node.target, "__name__", str(node.target)) in _SHAPE_ONLY:
                depends = node in self._propagation.changed_in
            else:
                depends = node in self._propagation.changed_in or any(
                    source in found and self.info[source].has_tensors for source in node.all_input_nodes
                )
            if depends:
                found.add(node)
        return found

    def reference(self, stage: int) -> tuple[Leaf, int] | None:
        """A tensor that the stage receives, and its dim with the samples."""
        for leaf in self.needs[stage].leaves:
            for dim, size in enumerate(self.tensor(leaf).sizes):
                if size.per_sample > 0 and size.fixed == 0:
                    return leaf, dim
        return None

    def _find_needs(self, stage: int) -> Needs:
        needs = Needs()
        for node in self.nodes_of(stage):
            for source in node.all_input_nodes:
                self._need(source, stage, needs)
        if stage == self.num_stages - 1:
            for node in self.output_leaves:
                self._need(node, stage, needs)
        if needs.integers and not self._has_reference(needs):
            for node in list(needs.integers):
                del needs.integers[node]
                self._compute_again(node, stage, needs)
        needs.leaves = dict.fromkeys(sorted(needs.leaves, key=lambda leaf: (*self._rank(leaf.node), leaf.index)))
        return needs

    def _rank(self, node: fx.Node) -> tuple[int, int]:
        home = self.home[node]
        return (-1 if home is None else home, self.order[node])

    def _has_reference(self, needs: Needs) -> bool:
        return any(size.per_sample > 0 and size.fixed == 0 for leaf in needs.leaves for size in self.tensor(leaf).sizes)

    def _need(self, node: fx.Node, stage: int, needs: Needs) -> None:
        if self.home[node] == stage or node in needs.again:
            return
        info = self.info[node]
        if node.op == "get_attr" or self._is_recomputable(node):
            self._compute_again(node, stage, needs)
        elif info.has_tensors:
            needs.leaves.update(dict.fromkeys(self.leaves_of(node)))
            if not all(isinstance(leaf, TensorInfo | Constant) for leaf in info.leaves):
                raise ValueError(
                    f"node {node.name} ({node.target}){_at(node)} returns integers that depend on the batch size "
                    f"inside a structure that stage {stage} "
                    "needs: return them as tensors, or start the stage elsewhere"
                )
        elif info.is_leaf and isinstance(info.leaves[0], Affine):
            needs.integers[node] = None
        elif not is_literal(info):
            self._compute_again(node, stage, needs)

    def _compute_again(self, node: fx.Node, stage: int, needs: Needs) -> None:
        if node.op in ("call_module", "placeholder"):
            raise ValueError(
                f"stage {stage} needs the result of node {node.name} ({node.op} {node.target}){_at(node)}, which "
                "is no tensor and depends on the "
                "batch size: return it as a tensor, or start the stage elsewhere"
            )
        for source in node.all_input_nodes:
            self._need(source, stage, needs)
        needs.again[node] = None

    def _is_recomputable(self, node: fx.Node) -> bool:
        """Whether a node is computed again rather than sent: it reads only buffers and constants, and is not random."""
        if node not in self._again:
            self._again[node] = self._reads_constants_only(node)
        return self._again[node]

    def _reads_constants_only(self, node: fx.Node) -> bool:
        if node.target is by_mode:
            return True
        if node.op == "get_attr":
            return not any(isinstance(leaf, TensorInfo) and leaf.requires_grad for leaf in self.info[node].leaves)
        if node.op not in ("call_function", "call_method") or not self.info[node].has_tensors:
            return False
        name = getattr(node.target, "__name__", str(node.target))
        tensors = [leaf for leaf in self.info[node].leaves if isinstance(leaf, TensorInfo)]
        if any(word in name for word in _RANDOM_WORDS) or any(leaf.requires_grad for leaf in tensors):
            return False
        if self._propagation.aliases[node] & self._changed_memory:
            return False
        return all(
            self._is_recomputable(source) or (not self.info[source].has_tensors and _is_plain(self.info[source]))
            for source in node.all_input_nodes
        )


def _is_plain(info: NodeInfo) -> bool:
    return info.is_leaf and isinstance(info.leaves[0], Affine | Constant)


def _at(node: fx.Node) -> str:
    return f" at {node.meta['source']}" if node.meta["source"] else ""


class StageBuilder:
    """Builds the graph of one stage."""

    def __init__(self, cut: GraphCut, stage: int, names: dict[Leaf, str]) -> None:
        self._cut, self._stage, self._names = cut, stage, names
        self._graph = fx.Graph()
        self._here: dict[fx.Node, Any] = {}
        self._received: dict[Leaf, fx.Node] = {}

    def build(self, outputs: Iterable[Leaf]) -> fx.Graph:
        """The graph: placeholders for what the stage needs, in order, then its nodes, then the tuple of `outputs`."""
        needs = self._cut.needs[self._stage]
        for position, leaf in enumerate(needs.leaves):
            name = re.sub(r"\W", "_", self._names[leaf])
            taken = any(name == node.target for node in self._received.values())
            self._received[leaf] = self._graph.placeholder(f"{name}_{position}" if taken else name)
        for leaf, node in list(self._received.items()):
            if self._cut.changed_in(leaf, self._stage):
                self._refuse_shared_change(leaf)
                self._received[leaf] = self._graph.call_method("clone", (node,))
        again = sorted(needs.again, key=lambda node: self._cut.order[node])
        self._copy(again)
        self._copy(self._cut.nodes_of(self._stage))
        self._graph.output(tuple(self._leaf(leaf) for leaf in outputs))
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
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._argument)
            self._here[node] = self._graph.create_node(node.op, node.target, args, kwargs, node.name)
            self._here[node].meta["source"] = node.meta["source"]
        if token is not None:
            self._graph.call_function(exit_modes, (token,))

    def _leaf(self, leaf: Leaf) -> Any:
        if leaf in self._received:
            return self._received[leaf]
        if self._cut.info[leaf.node].is_leaf:
            return self._here[leaf.node]
        return self._graph.call_function(_leaf_taker(leaf.index), (self._here[leaf.node],))

    def _argument(self, node: fx.Node) -> Any:
        if node not in self._here:
            self._here[node] = self._foreign(node)
        return self._here[node]

    def _foreign(self, node: fx.Node) -> Any:
        info, numbers = self._cut.info[node], self._cut.numbers
        if node in self._cut.needs[self._stage].integers:
            reference = self._cut.reference(self._stage)
            assert reference is not None
            leaf, dim = reference
            size = self._graph.call_method("size", (self._received[leaf], dim))
            return self._graph.call_function(numbers.from_size(node, leaf.node, leaf.index, dim), (size,))
        if is_literal(info):
            return self._graph.call_function(numbers.constant(node))
        if info.is_leaf:
            return self._received[Leaf(node, 0)]
        tensors = tuple(self._received[leaf] for leaf in self._cut.leaves_of(node))
        return self._graph.call_function(numbers.rebuilder(node), tensors)

    def _refuse_shared_change(self, leaf: Leaf) -> None:
        cut = self._cut
        for stage, needs in enumerate(cut.needs):
            for other in needs.leaves:
                if (
                    (stage, other) != (self._stage, leaf)
                    and stage >= self._stage
                    and cut.shares_memory(other.node, leaf.node)
                ):
                    raise ValueError(
                        f"stage {self._stage} changes {self._names[leaf]} (made by node "
                        f"{leaf.node.name}{_at(leaf.node)}) in place, and stage {stage} "
                        f"reads {self._names[other]} in the same memory: across stages the change would be lost; "
                        "use the out-of-place operation"
                    )


def _leaf_taker(index: int) -> Callable[[Any], Any]:
    def leaf(value: Any) -> Any:
        return pytree.tree_leaves(value)[index]

    leaf.__name__ = leaf.__qualname__ = f"leaf_{index}"
    return leaf


def stage_module(model: nn.Module, captured: Captured, graph: fx.Graph, stage: int) -> fx.GraphModule:
    """A module that runs `graph` and shares, under the model's names, what the graph calls and reads."""
    module = fx.GraphModule(nn.Module(), fx.Graph(), class_name=f"Stage{stage}")
    for kind in ("call_module", "get_attr"):
        for node in graph.nodes:
            if node.op == kind:
                _install(module, model, captured.constants, str(node.target))
    module.training = model.training
    module.graph = graph
    return module


def _install(module: nn.Module, model: nn.Module, constants: dict[str, Any], target: str) -> None:
    if target == "training":
        return
    if target in constants:
        value = constants[target]
        if isinstance(value, torch.Tensor):
            module.register_buffer(target, value, persistent=False)
        else:
            setattr(module, target, value)
        return
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
