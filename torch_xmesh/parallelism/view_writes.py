"""Writes through views, rewritten as writes to the tensor that is viewed.

    h = linear(x)                        h = linear(x)
    part = h[:, 4:8]                     part = h[:, 4:8]
    part.mul_(3)            -->          new = part.clone()
                                         new.mul_(3)
                                         h[:, 4:8] = new
                                         part.1 = h[:, 4:8]      for those who read part from then on

A stage may hold `h` and `part` as parts of other dims, in memory of their own, so that what is written to one of them
does not reach the other. Behind the rewrite all goes through `h`. (torch.export does as much for whole graphs, where
nothing is changed in place any more: "functionalization".)
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.capture.node_forms import name_of
from torch_xmesh.pipeline.capture.recording import NodeFacts, Recording, TensorFacts, structure_of

_CHANGE_THE_TENSOR = frozenset(
    "t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ resize_ resize_as_ set_ as_strided_ rename_ detach_ "
    "requires_grad_".split()
)
"""Functions in place that write nothing: another view of the memory, or of the graph, goes by the same name."""

_PICKS = frozenset({"__getitem__", "getitem"})
_VIEWS = _PICKS | frozenset(
    "view reshape flatten unflatten transpose permute swapaxes swapdims movedim moveaxis t T mT "
    "select narrow squeeze unsqueeze diagonal chunk split unbind tensor_split contiguous".split()
)
"""Functions whose result has the elements of their first argument, or some of them, and can be made again of it.
Whether that is a view or a copy depends on strides, which differ between devices: nothing is written to it there."""

Step = tuple[str, tuple[Any, ...], dict[str, Any]]


def write_view(base: torch.Tensor, steps: tuple[Step, ...], value: torch.Tensor) -> None:
    """Writes `value` to the view of `base` that `steps` lead to: names of functions, each with what it is given besides
    the result of the one before."""
    places = torch.arange(base.numel(), device=base.device).view(base.shape)
    for name, args, kwargs in steps:
        places = _step(places, name, args, kwargs)
    written = value.to(base.dtype).expand(places.shape).reshape(-1)
    base.copy_(base.reshape(-1).index_put((places.reshape(-1),), written).view(base.shape))


def with_direct_writes(recording: Recording) -> Recording:
    """The recording, which is changed: what it writes to through views, in memory that the forward itself has made, and
    what is read later under another name. Other changes stay as they are."""
    out = _Rewriter(recording)
    for memory, changer in dict.fromkeys((memory, changer) for memory, _, changer in recording.mutations):
        out.rewrite(memory, changer)
    return out.done()


class _Rewriter:
    def __init__(self, recording: Recording) -> None:
        self._recording, self._graph = recording, recording.graph
        self._facts = dict(recording.facts)
        self._output = recording.output
        self._mutations = list(recording.mutations)

    def rewrite(self, memory: int, changer: fx.Node) -> None:
        """One change of memory."""
        order = {node: i for i, node in enumerate(self._graph.nodes)}
        base = self._base_of(memory)
        changed = next(iter(changer.all_input_nodes), None)
        is_alone = {changed_memory for changed_memory, _, node in self._mutations if node is changer} == {memory}
        if base is None or changed is None or changer.args[:1] != (changed,) or not is_alone:
            return
        if memory not in self._facts[changed].memory or _name(changer) in _CHANGE_THE_TENSOR:
            return
        if self._facts[changer].draws and changed is not base:  # a copy's elements would be drawn in another order
            return
        held = [node for node in order if memory in self._facts[node].memory and order[node] <= order[changer]]
        read = [node for node in held if self._is_read_behind(changer, node, order)]
        if not any(node not in (changed, changer) for node in read):
            return  # it goes by one name from then on
        found = {node: self._chain(node, base) for node in (changed, *read)}
        chains = {node: chain for node, chain in found.items() if chain is not None}
        if len(chains) < len(found):
            return
        last = changer if changed is base else self._write(changer, changed, base, chains[changed])
        self._view_again(changer, last, base, {node: chains[node] for node in read if node is not base}, order)
        if changer.target == "copy_" and last is not changer:
            self._graph.erase_node(changer)

    def done(self) -> Recording:
        order = {node: i for i, node in enumerate(self._graph.nodes)}
        self._mutations.sort(key=lambda mutation: order[mutation[-1]])
        return dataclasses.replace(
            self._recording,
            output=self._output,
            facts={node: self._facts[node] for node in order},
            mutations=[(memory, order[node] + 1, node) for memory, _, node in self._mutations],
        )

    def _base_of(self, memory: int) -> fx.Node | None:
        """The tensor that has all of the memory, if the forward makes it."""
        for node in self._graph.nodes:
            facts = self._facts[node]
            if memory in facts.memory:
                if node.op in ("placeholder", "get_attr"):
                    return None
                if facts.memory == {memory}:
                    return node if facts.structure.is_leaf() else None
        return None

    def _is_read_behind(self, changer: fx.Node, node: fx.Node, order: Mapping[fx.Node, int]) -> bool:
        leaves = pytree.tree_leaves(self._output)
        return any(node is leaf for leaf in leaves) or any(order[user] > order[changer] for user in node.users)

    def _chain(self, node: fx.Node, base: fx.Node) -> list[fx.Node] | None:
        """The views that lead from `base` to `node`; None where something else does."""
        changers = {changer for _, _, changer in self._mutations}
        chain: list[fx.Node] = []
        while node is not base:
            if not node.args or node.all_input_nodes[:1] != [node.args[0]]:
                return None
            if structure_of(node) is not None or _is_view(node):
                chain.insert(0, node)
            elif node not in changers or not self._gives_back(node):
                return None
            node = node.all_input_nodes[0]
        return chain

    def _gives_back(self, changer: fx.Node) -> bool:
        """Whether a change in place gives back the tensor that it was given, as it lay."""
        if _name(changer) in _CHANGE_THE_TENSOR:
            return False
        mine, theirs = self._facts[changer], self._facts[changer.all_input_nodes[0]]
        return mine.memory == theirs.memory and [leaf[:2] for leaf in mine.tensors] == [
            leaf[:2] for leaf in theirs.tensors
        ]

    def _write(self, changer: fx.Node, changed: fx.Node, base: fx.Node, chain: Sequence[fx.Node]) -> fx.Node:
        """Has the change happen to `base`, by the node that is returned."""
        (memory,) = self._facts[base].memory
        instead = []
        if changer.target == "copy_":
            value = changer.args[1] if len(changer.args) > 1 else changer.kwargs["src"]
        else:
            with self._graph.inserting_before(changer):
                value = self._graph.call_method("clone", (changed,))
            fresh = -1 - len(self._facts)
            self._define(value, changer, dataclasses.replace(self._facts[changed], memory=frozenset({fresh})))
            changer.args = (value, *changer.args[1:])
            kept = self._facts[changer].memory - {memory}
            is_own = memory in self._facts[changer].memory
            self._facts[changer] = dataclasses.replace(
                self._facts[changer], memory=kept | ({fresh} if is_own else frozenset())
            )
            instead = [(fresh, 0, changer)]
        with self._graph.inserting_after(changer):
            if len(chain) == 1 and _name(chain[0]) in _PICKS:
                writer = self._graph.call_method("__setitem__", (base, chain[0].args[1], value))
            else:
                writer = self._graph.call_function(write_view, (base, tuple(map(_as_step, chain)), value))
        nothing = NodeFacts.of(None, is_real=False, is_random=self._facts[changer].is_random)
        self._define(writer, changer, nothing)
        writer.meta["changes_to_gradient"] = changer.meta["changes_to_gradient"]
        others = [mutation for mutation in self._mutations if mutation[-1] is not changer]
        self._mutations = [*others, *instead, (memory, 0, writer)]
        return writer

    def _view_again(
        self,
        changer: fx.Node,
        last: fx.Node,
        base: fx.Node,
        chains: Mapping[fx.Node, Sequence[fx.Node]],
        order: Mapping[fx.Node, int],
    ) -> None:
        """Views that are read behind the change are made once more, behind `last`, which makes it."""
        made = {base: base}
        for name, chain in chains.items():
            for view in chain:
                if view in made:
                    continue
                given = (made[self._viewed(view, made)], *view.args[1:])
                with self._graph.inserting_after(last):
                    last = made[view] = self._graph.create_node(view.op, view.target, given, view.kwargs)
                facts = self._facts[view]
                modes = view.meta["modes"]
                has_gradient = bool(changer.meta["changes_to_gradient"]) and (modes is None or modes[0])
                leaves = tuple(
                    leaf._replace(requires_grad=leaf.requires_grad or has_gradient)
                    if isinstance(leaf, TensorFacts)
                    else leaf
                    for leaf in facts.leaves
                )
                self._define(last, changer, dataclasses.replace(facts, leaves=leaves))
                last.meta.update({key: view.meta[key] for key in ("modes", "path") if key in view.meta})
            new = made[chain[-1]] if chain else base
            for user in [*name.users]:
                if order.get(user, -1) > order[changer]:
                    user.replace_input_with(name, new)
            self._output = pytree.tree_map(functools.partial(_instead, name, new), self._output)

    def _viewed(self, view: fx.Node, made: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """What a view is of: what a change in place gives back is what it was given."""
        source = view.all_input_nodes[0]
        while source not in made:
            source = source.all_input_nodes[0]
        return source

    def _define(self, node: fx.Node, like: fx.Node, facts: NodeFacts) -> None:
        node.meta.update({key: like.meta[key] for key in ("source", "modules", "modes", "checkpoint")})
        self._facts[node] = facts


def _step(value: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if name in _PICKS:
        return value[args[0]]
    found = getattr(value, name)
    return found(*args, **kwargs) if callable(found) else found


def _is_view(node: fx.Node) -> bool:
    """Whether it can be made again, of its first argument alone."""
    is_retyped = any(isinstance(argument, torch.dtype) for argument in (*node.args, *node.kwargs.values()))
    is_function = node.op in ("call_function", "call_method")
    return is_function and not is_retyped and _name(node) in _VIEWS and len(node.all_input_nodes) == 1


def _as_step(view: fx.Node) -> Step:
    args = view.args[2:] if view.target is getattr else view.args[1:]
    return _name(view), tuple(args), dict(view.kwargs)


def _name(node: fx.Node) -> str:
    if node.target is getattr:
        return str(node.args[1])
    return node.target if isinstance(node.target, str) else name_of(node.target)


def _instead(name: fx.Node, new: fx.Node, leaf: Any) -> Any:
    return new if leaf is name else leaf
