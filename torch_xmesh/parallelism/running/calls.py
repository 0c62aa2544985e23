"""An operator as a stage runs it: prepared once, run for each microbatch."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx, nn

from torch_xmesh.parallelism.loops import Loops
from torch_xmesh.parallelism.operators import Operator, Site, Value
from torch_xmesh.parallelism.program import ProgramOperator
from torch_xmesh.parallelism.rows.experts import CLASSES
from torch_xmesh.parallelism.running.attention import attention
from torch_xmesh.parallelism.running.batch_norm import batch_norm
from torch_xmesh.parallelism.running.called_modules import OWN, CalledModule
from torch_xmesh.parallelism.running.collectives import Moves
from torch_xmesh.parallelism.running.experts import experts
from torch_xmesh.parallelism.running.fetching import cast_for
from torch_xmesh.parallelism.running.local_rules import DRAWING, Local, Rule, is_plain, rules, shape_made
from torch_xmesh.parallelism.running.ways import Way
from torch_xmesh.pipeline.capture.name_order import NameOrder
from torch_xmesh.pipeline.capture.recording import memory_of, structure_of
from torch_xmesh.pipeline.capture.regions import enter_modes

RULES: dict[str, Rule] = {
    **rules,
    "batch_norm": batch_norm,
    "scaled_dot_product_attention": attention,
    **dict.fromkeys(CLASSES, experts),
}
"""How operators run on parts where that is not the call itself, by kind."""


def runs_in_parts(kind: str, loops: Loops, *, draws: bool) -> bool:
    """Whether devices can do parts of an operator of these loops; else each does all of it."""
    if draws and kind not in DRAWING:
        return False
    return kind in RULES or not (loops.once or loops.within)


@dataclasses.dataclass(frozen=True)
class _Slot:
    """The place of a tensor among the arguments."""

    number: int


@dataclasses.dataclass(frozen=True)
class _Source:
    """A tensor among the arguments. `way`: None where its shape or type alone is read."""

    value: Value
    way: Way | None


class OperatorCall:
    """An operator with its arguments.

    Args:
        planned: how it is sharded.
        takes: for each tensor that it reads, in order, what stands for it, and how it comes from there.
        leaves: by value that it makes, how that goes to its readers, if these are several.
        changes: it changes its first argument in place.
        owns: what it makes has memory of its own, and that or what it reads is changed in place later: on a device a
            copy (``contiguous``) may turn out to be none.
        module: that is called, where it is one.
    """

    def __init__(
        self,
        operator: Operator,
        planned: ProgramOperator,
        site: Site,
        moves: Moves,
        *,
        takes: Sequence[tuple[Value, Way]],
        leaves: Sequence[Way],
        changes: bool,
        owns: bool = False,
        module: nn.Module | None = None,
    ) -> None:
        self._moves, self._changes, self._owns, self._kind = moves, changes, owns, operator.kind
        self._site, self._operator = site, operator
        self._function = _function_of(site.node) if module is None else CalledModule(module)
        self._modes = site.node.meta.get("modes")
        self._local: Local | None = None
        if operator.is_known and not operator.is_constant and operator.kind in RULES:
            self._local, self._rule = (
                Local(operator, planned, moves, self._function, site.node.meta.get("order")),
                RULES[operator.kind],
            )
        taken = iter(takes)
        self._sources = [
            _Source(*next(taken)) if is_read else _Source(value, None)
            for value, is_read in zip(site.sources, site.is_read, strict=True)
        ]
        slots = iter(range(len(self._sources)))

        def slot(argument: Any) -> Any:
            if not isinstance(argument, fx.Node):
                return argument
            number = next(slots, None)
            if number is None:
                raise ValueError(
                    f"{operator.name} takes what is no tensor, and made in the forward: that cannot be run"
                )
            return _Slot(number)

        self._args: list[Any] = list(fx.node.map_aggregate(tuple(site.node.args), slot))
        self._kwargs: dict[str, Any] = dict(fx.node.map_aggregate(site.node.kwargs, slot))
        if module is not None:  # its parameters are the sources behind the arguments
            self._kwargs |= {
                f"{OWN}{name}": _Slot(next(slots)) for name, _ in NameOrder(module).sorted(module.named_parameters())
            }
        self._is_flat = not self._kwargs and not any(
            isinstance(item, list | tuple | dict | slice) for item in self._args
        )
        others = [place for place in site.places if not _is_own(place, site.node)]  # views of its memory, read last
        behind = {place: len(self._sources) - len(others) + number for number, place in enumerate(others)}
        self._makes = [
            (value, _finder(place, site.node, behind.get(place)), way)
            for place, value, way in zip(site.places, operator.makes, leaves, strict=True)
        ]

    @property
    def reads(self) -> list[Value]:
        """Tensors among its arguments."""
        return [source.value for source in self._sources]

    @property
    def makes(self) -> tuple[Value, ...]:
        return self._operator.makes

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether it runs without collectives, changes nothing, and can be written down as nodes of a graph."""
        node = self._site.node
        ways = [*(source.way for source in self._sources), *(way for _, _, way in self._makes)]
        return (
            node.op in ("call_function", "call_method")
            and self._modes is None
            and not self._changes
            and not self._operator.draws
            and all(way is not None and not way.there and not way.back for way in ways)
            and all(place is node or structure_of(place) is node for place in self._site.places)
            and (self._local is None or is_plain(self._local))
        )

    def write(self, graph: fx.Graph, nodes: dict[Value, fx.Node]) -> None:
        """As nodes of a graph; `nodes` are those of the values that it reads, and will be of those that it makes."""
        given = [nodes[value] for value in self.reads]

        def fill(argument: Any) -> Any:
            return given[argument.number] if isinstance(argument, _Slot) else argument

        args = tuple(fx.node.map_aggregate(tuple(self._args), fill))
        kwargs = dict(fx.node.map_aggregate(self._kwargs, fill))
        node = self._site.node
        shape = None if self._local is None else shape_made(self._local)
        if shape is not None:
            made = graph.call_method(shape[0], (args[0], shape[1]))
        else:
            made = graph.create_node(node.op, node.target, args, kwargs)
        for place, value in zip(self._site.places, self.makes, strict=True):
            nodes[value] = made
            if place is not node:
                nodes[value] = graph.call_function(cast(Any, place.target), (made, *place.args[1:]))
            if self._owns:
                nodes[value] = graph.call_method("clone", (nodes[value],))

    def cast(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter as the operator takes it under the autocast that is on."""
        return parameter if self._modes is not None else cast_for(self._kind, parameter)

    def run(self, parts: dict[Value, Any]) -> None:
        """Reads this device's parts of values, and adds those of what it makes."""
        given = [self._given(source, parts) for source in self._sources]
        if self._is_flat:
            args, kwargs = [given[item.number] if type(item) is _Slot else item for item in self._args], self._kwargs
        else:

            def fill(argument: Any) -> Any:
                return given[argument.number] if isinstance(argument, _Slot) else argument

            args = list(fx.node.map_aggregate(self._args, fill))
            kwargs = dict(fx.node.map_aggregate(self._kwargs, fill))
        if self._modes is None:
            made = self._called(args, kwargs)
        else:
            with enter_modes(*self._modes):
                made = self._called(args, kwargs)
        for value, found, way in self._makes:
            part = found(made, args, given)
            if self._owns and any(_is_shared(part, argument) for argument in given):
                part = part.clone()
            parts[value] = way.moved(part, self._moves)

    def _called(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return self._function(*args, **kwargs) if self._local is None else self._rule(self._local, args, kwargs)

    def _given(self, source: _Source, parts: dict[Value, Any]) -> Any:
        value, way = source.value, source.way
        if way is None:
            return (
                parts[value]
                if value in parts
                else torch.empty((), dtype=value.dtype, device=self._moves.device).expand(value.shape)
            )
        moved = way.moved(parts[value], self._moves)
        is_moved = moved.requires_grad or bool(way.there)
        if self._changes and is_moved and moved._is_view():  # made by a move: autograd cannot change it
            return moved.clone()
        return moved


def _is_shared(tensor: torch.Tensor, other: Any) -> bool:
    """Whether two tensors have the same memory."""
    return isinstance(other, torch.Tensor) and memory_of(tensor) == memory_of(other)


_Finder = Callable[[Any, list[Any], list[Any]], torch.Tensor]


def _is_own(place: fx.Node, node: fx.Node) -> bool:
    """Whether a tensor is what a call makes, a part of that, or its first argument, which it changes."""
    first = node.args[0] if node.args else None
    return place is node or structure_of(place) is node or place is first


def _finder(place: fx.Node, node: fx.Node, behind: int | None) -> _Finder:
    """Finds a tensor in what a call has made, or among its arguments, or among all that it was given."""
    if behind is not None:
        return lambda made, args, given: given[behind]
    if place is node:
        return lambda made, args, given: made
    if structure_of(place) is node:
        return lambda made, args, given: place.target(made, *place.args[1:])  # type: ignore[operator]
    return lambda made, args, given: args[0]  # which was changed


def _function_of(node: fx.Node) -> Callable[..., Any]:
    if node.op == "call_method":
        name = str(node.target)
        return lambda own, *args, **kwargs: getattr(own, name)(*args, **kwargs)
    return node.target  # type: ignore[return-value]
