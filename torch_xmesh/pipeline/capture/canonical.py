"""The order of a recording's nodes, and their names, without what differs from process to process.

A loop over a set of strings runs in another order in each process. Where the turns of a loop have nothing to do with
one another, the recording has them in the order of what they compute instead: by the names of the modules that they
call, then by their constants. Everything else stays in the order in which it ran.

    for kind in {"sliding", "full"}:          met           recorded
        rotary(x, kind)                       sliding       full
                                              full          sliding
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from torch_xmesh.pipeline.capture.call_sites import CallSite, loops_of
from torch_xmesh.pipeline.capture.name_order import NameOrder, natural
from torch_xmesh.pipeline.capture.recording import NodeFacts, structure_of

Mutations = Sequence[tuple[int, int, fx.Node]]


def make_canonical(
    graph: fx.Graph,
    ways: Mapping[fx.Node, tuple[CallSite, ...]],
    facts: Mapping[fx.Node, NodeFacts],
    mutations: Mutations,
    constants: Mapping[str, Any],
    names: NameOrder,
) -> dict[str, Any]:
    """Brings the nodes of a graph into canonical order, and numbers equal names, and constants, in it.

    Args:
        ways: call sites that led to the calls that made the nodes.
        constants: constants that the graph reads, by name.
        names: names of what the model holds, sorted.

    Returns:
        the constants under their new names.
    """
    nodes = list(graph.nodes)
    events = [node for node in nodes if _is_event(node)]
    ordered = _with_sources(nodes, _Order(ways, _links(events, facts, mutations), names).of(events))
    if nodes != ordered:
        for node in ordered:
            graph._root.prepend(node)
    return _rename(graph, constants)


def _is_event(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "get_attr") and structure_of(node) is None


def _whole(node: fx.Node) -> fx.Node:
    """The call of which a node is a part."""
    source = structure_of(node)
    return node if source is None else _whole(source)


def _links(
    events: Sequence[fx.Node], facts: Mapping[fx.Node, NodeFacts], mutations: Mutations
) -> dict[fx.Node, list[fx.Node]]:
    """By call, earlier ones that it must stay behind: those whose results it reads, the one that drew random numbers
    before it, and those that read or change memory that is changed."""
    changed = {memory for memory, _, _ in mutations}
    touched: dict[int, fx.Node] = {}
    out: dict[fx.Node, list[fx.Node]] = {}
    drawn: fx.Node | None = None
    for node in events:
        sources = [_whole(source) for source in node.all_input_nodes]
        behind = [source for source in sources if _is_event(source)]
        if facts[node].draws:
            behind += [] if drawn is None else [drawn]
            drawn = node
        held = {memory for other in (node, *node.all_input_nodes) for memory in facts[other].memory & changed}
        held |= {memory for memory, _, changer in mutations if changer is node}
        for memory in held:
            behind += [touched[memory]] if memory in touched else []
            touched[memory] = node
        out[node] = behind
    return out


class _Order:
    """Orders calls; earlier ones have their final places when later ones are looked at."""

    def __init__(
        self,
        ways: Mapping[fx.Node, tuple[CallSite, ...]],
        links: Mapping[fx.Node, Sequence[fx.Node]],
        names: NameOrder,
    ) -> None:
        self._ways, self._links, self._names = ways, links, names
        self._places: dict[fx.Node, int] = {}

    def of(self, events: Sequence[fx.Node]) -> list[fx.Node]:
        self._frame(events, 0)
        return sorted(events, key=self._places.__getitem__)

    def _frame(self, events: Sequence[fx.Node], depth: int) -> None:
        """Calls to which the ways are the same before `depth`."""

        def frame_of(node: fx.Node) -> int:
            way = self._ways[node]
            return way[depth].frame if depth < len(way) else -1

        for run in _runs(events, frame_of):
            if len(run) > 1 and frame_of(run[0]) != -1:
                self._within(run, depth, loops_of(self._ways[run[0]][depth].code))
            else:
                for node in run:
                    self._places[node] = len(self._places)

    def _within(self, events: Sequence[fx.Node], depth: int, loops: Sequence[tuple[int, int]]) -> None:
        """Calls in one frame, or in a loop of it that has these inner `loops`."""

        def place_of(node: fx.Node) -> tuple[int, int]:
            """The loop in which a call is made, or where it is made outside of loops."""
            offset = self._ways[node][depth].offset
            return next((loop for loop in loops if loop[0] <= offset <= loop[1]), (offset, offset))

        for run in _runs(events, place_of):
            first, last = place_of(run[0])
            inner = [loop for loop in loops if first <= loop[0] and loop[1] <= last and loop != (first, last)]
            if first == last:
                turns = _runs(run, lambda node: self._call_of(node, depth))
            else:
                turns = self._turns(run, depth, inner)
            for turn in self._sorted(turns, depth) if len(turns) > 1 else turns:
                if first == last:
                    self._frame(turn, depth + 1)
                else:
                    self._within(turn, depth, inner)

    def _call_of(self, node: fx.Node, depth: int) -> Any:
        """What tells the calls of one frame apart: the frame of what was called, where that is known."""
        way = self._ways[node]
        return way[depth + 1].frame if depth + 1 < len(way) else node

    def _turns(self, events: Sequence[fx.Node], depth: int, inner: Sequence[tuple[int, int]]) -> list[list[fx.Node]]:
        """The turns of a loop: a new one begins where the loop's code is gone back in."""

        def place_of(node: fx.Node) -> tuple[int, Any]:
            offset = self._ways[node][depth].offset
            start = next((loop[0] for loop in inner if loop[0] <= offset <= loop[1]), None)
            return (offset, self._call_of(node, depth)) if start is None else (start, None)

        turns: list[list[fx.Node]] = []
        before: tuple[int, Any] | None = None
        for node in events:
            here = place_of(node)
            if before is None or (here != before and here[0] <= before[0]):
                turns.append([])
            turns[-1].append(node)
            before = here
        return turns

    def _sorted(self, turns: Sequence[Sequence[fx.Node]], depth: int) -> list[Sequence[fx.Node]]:
        """Turns in canonical order, each behind those of which it needs something."""
        turn_of = {node: number for number, turn in enumerate(turns) for node in turn}
        behind = [
            {turn_of[source] for node in turn for source in self._links[node] if source in turn_of} - {number}
            for number, turn in enumerate(turns)
        ]
        readers: list[list[int]] = [[] for _ in turns]
        for number, earlier in enumerate(behind):
            for turn_before in earlier:
                readers[turn_before].append(number)
        ready = [(self._key(turns[number], depth), number) for number, earlier in enumerate(behind) if not earlier]
        heapq.heapify(ready)
        out = []
        while ready:
            _, number = heapq.heappop(ready)
            out.append(turns[number])
            for reader in readers[number]:
                behind[reader].discard(number)
                if not behind[reader]:
                    heapq.heappush(ready, (self._key(turns[reader], depth), reader))
        return out

    def _key(self, turn: Sequence[fx.Node], depth: int) -> Any:
        """What turns are sorted by: names of the modules that they come through, and of the model's tensors, then what
        is called where with which constants, then what is read."""
        modules = {name for node in turn for name in _modules_of(node)}
        tensors = {name for node in turn for name in _tensors_of(node)}

        def of_call(node: fx.Node) -> Any:
            read = [self._places.get(_whole(source), -1) for source in node.all_input_nodes]
            return self._ways[node][depth].offset, natural(_words(node)), read

        key = self._names.key
        return sorted(map(key, modules)), sorted(map(key, tensors)), sorted(map(of_call, turn))


def _runs(events: Sequence[fx.Node], kind: Any) -> list[list[fx.Node]]:
    """Neighbors of the same kind."""
    out: list[list[fx.Node]] = []
    for node in events:
        if out and kind(out[-1][0]) == kind(node):
            out[-1].append(node)
        else:
            out.append([node])
    return out


def _modules_of(node: fx.Node) -> Iterable[str]:
    """The modules that are called on the way to a call, or by it; the model itself is none."""
    return (name for name in node.meta["modules"] if name)


def _tensors_of(node: fx.Node) -> Iterable[str]:
    """What a call reads of the model, or of its arguments, by name."""
    named = (str(source.target) for source in node.all_input_nodes if source.op in ("get_attr", "placeholder"))
    return (name for name in named if not name.startswith("_constant"))


def _words(node: fx.Node) -> str:
    """What a call computes, its numbers left out: they may depend on sizes, and the order must not."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__qualname__", "")
    leaves = [leaf for leaf in _literals((node.args, node.kwargs)) if isinstance(leaf, str | torch.dtype | bool | None)]
    return " ".join([target, *map(str, leaves)])


def _literals(tree: Any) -> Iterable[Any]:
    """The leaves of arguments, dicts by key."""
    if isinstance(tree, dict):
        for key in sorted(tree, key=str):
            yield str(key)
            yield from _literals(tree[key])
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _literals(item)
    elif isinstance(tree, slice):
        yield from _literals((tree.start, tree.stop, tree.step))
    else:
        yield tree


def _with_sources(nodes: Sequence[fx.Node], ordered: Sequence[fx.Node]) -> list[fx.Node]:
    """All nodes: inputs, then calls, each behind what of the model it reads and before its parts."""
    parts: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        source = structure_of(node)
        if source is not None:
            parts.setdefault(source, []).append(node)
    placed = {node: None for node in nodes if node.op == "placeholder"}

    def place(node: fx.Node) -> None:
        placed.setdefault(node)
        for part in parts.get(node, ()):
            place(part)

    for node in ordered:
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                place(source)
        place(node)
    for node in nodes:  # what only the output, or a guard, reads
        place(node)
    return list(placed)


def _rename(graph: fx.Graph, constants: Mapping[str, Any]) -> dict[str, Any]:
    """The names that nodes and constants have if they are met in this order."""
    namespace = fx.graph._Namespace()  # type: ignore[no-untyped-call]
    new: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == "get_attr" and str(node.target) in constants:
            node.target = new.setdefault(str(node.target), f"_constant{len(new)}")
        node.name = namespace.create_name(graph._target_to_str(node.target), None)
    return {name: constants[old] for old, name in new.items()}
