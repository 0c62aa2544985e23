"""Experts of a mixture that lie on several devices: tokens are sent to the devices of their experts, and what these
make of them is fetched back (D. Lepikhin et al., GShard, 2020).

pairs of a token and one of its experts --> those whose expert may be reached from here
    --> hop by hop, one per axis that tokens are sent along --> this device's experts
    --> back by the same hops --> weighted, and added up by token
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from torch_xmesh.parallelism.running.called_modules import OWN, CalledModule
from torch_xmesh.parallelism.running.collectives import Hop, Moves
from torch_xmesh.parallelism.running.local_rules import Local


class _Exchanged(torch.autograd.Function):
    """Rows on a hop, or back; their gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, moves: Moves, hop: Hop, name: str, is_back: bool) -> torch.Tensor:
        ctx.moves, ctx.hop, ctx.name, ctx.is_back = moves, hop, name, is_back
        return moves.exchange(rows, hop, name, "forward", is_back=is_back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows = ctx.moves.exchange(gradients[0], ctx.hop, ctx.name, "backward", is_back=not ctx.is_back)
        return rows, None, None, None, None


WHOLE_BECAUSE = "a planned stage with experts runs alike on all devices of a mesh, whichever experts are given tokens"
"""Why the backward of a stage with experts is not split: devices would do that in different ways, since only those
whose experts are given tokens have parameters' gradients to compute later."""


class _Reached(torch.autograd.Function):
    """What experts have made. Backward goes on to what they were given, reads their parameters, and gives these
    gradients, also on a device whose experts are given nothing (`is_idle`): all devices run the same collectives."""

    @staticmethod
    def forward(ctx: Any, made: torch.Tensor, is_idle: bool, num_parameters: int, *read: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*read[:num_parameters])
        ctx.is_idle, ctx.given = is_idle, [(tensor.shape, tensor.dtype) for tensor in read[num_parameters:]]
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), parameters = gradients, ctx.saved_tensors
        if not ctx.is_idle:
            return gradient, None, None, *[None] * (len(parameters) + len(ctx.given))
        of_given = (gradient.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.given)
        return gradient, None, None, *map(torch.zeros_like, parameters), *of_given


def _reached(
    made: torch.Tensor, given: Sequence[torch.Tensor], own: Mapping[str, torch.Tensor], *, is_idle: bool
) -> torch.Tensor:
    out: torch.Tensor = _Reached.apply(made, is_idle, len(own), *own.values(), *given)  # type: ignore[no-untyped-call]
    return out


class _Routes:
    """Which device along the mesh axes that cut the experts has which.

    Args:
        num_local: experts of one device.
    """

    def __init__(self, local: Local, num_local: int) -> None:
        self._moves, self._name = local.moves, local.operator.makes[0].name
        labels = local.planned.axes
        self._axes = [axis for axis, label in enumerate(labels) if label in ("shown", "routed")]
        self._shown = [axis for axis in self._axes if labels[axis] == "shown"]
        self.routed = [axis for axis in self._axes if labels[axis] == "routed"]
        sizes = [local.mesh_shape[axis] for axis in self._axes]
        self._grid = torch.arange(math.prod(sizes) * num_local, device=self._moves.device).view(*sizes, num_local)
        self.first = local.place_along(self._axes) * num_local

    def is_reached(self, experts: torch.Tensor) -> torch.Tensor:
        """Whether devices that this one can send to have each: the others are shown the same tokens. A number behind
        the last is of no expert, as transformers has it."""
        reached = self._grid
        for axis in self._shown:
            place = self._axes.index(axis)
            reached = reached.narrow(place, self._moves.coordinate[axis], 1)
        found = torch.zeros(self._grid.numel() + 1, dtype=torch.bool, device=self._grid.device)
        found[reached.flatten()] = True
        return found[experts]

    def hop(self, axis: int, experts: torch.Tensor) -> tuple[Hop, torch.Tensor]:
        """To the devices along an axis that have these experts, which ascend, and the experts of the rows that come
        from there."""
        place = self._axes.index(axis)
        counts = torch.zeros_like(self._grid).flatten().scatter_add(0, experts, torch.ones_like(experts))
        counts = counts.view(self._grid.shape).movedim(place, 0).flatten(1)
        coming = self._moves.swapped(counts, axis)
        own = self._grid.select(place, self._moves.coordinate[axis]).flatten()
        sent, received = torch.stack([counts.sum(1), coming.sum(1)]).tolist()  # the host waits for the device once
        repeats = coming.flatten()
        there = own.repeat(len(coming)).repeat_interleave(repeats, output_size=sum(received))
        return Hop(axis, tuple(sent), tuple(received)), there

    def move(self, rows: torch.Tensor, hop: Hop, *, is_back: bool) -> torch.Tensor:
        """Rows on a hop, or back, with autograd."""
        out: torch.Tensor = _Exchanged.apply(rows, self._moves, hop, self._name, is_back)  # type: ignore[no-untyped-call]
        return out


def experts(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """As transformers' modules of experts; a sum's summand where axes show all tokens to some of them."""
    given = dict(zip(["hidden_states", "top_k_index", "top_k_weights"], args, strict=False)) | dict(kwargs)
    hidden, index, weights = given["hidden_states"], given["top_k_index"], given["top_k_weights"]
    own = {key: argument for key, argument in given.items() if key.startswith(OWN)}
    num_local = len(own[f"{OWN}down_proj"])
    if not {"shown", "routed"} & {*local.planned.axes}:
        return _reached(local.function(*args, **kwargs), (hidden, weights), own, is_idle=not (index < num_local).any())
    routes = _Routes(local, num_local)
    flat = index.flatten()
    pairs = routes.is_reached(flat).nonzero().flatten()
    tokens, chosen = pairs // index.shape[1], flat[pairs]
    rows, ways = hidden.index_select(0, tokens), []
    for axis in routes.routed:
        order = chosen.argsort(stable=True)
        hop, chosen = routes.hop(axis, chosen[order])
        rows = routes.move(rows.index_select(0, order), hop, is_back=False)
        ways.append((hop, order))
    made = _computed(cast(CalledModule, local.function), rows, chosen - routes.first, weights, own)
    for hop, order in reversed(ways):
        made = routes.move(made, hop, is_back=True).index_select(0, order.argsort())
    weighted = made * weights.flatten().index_select(0, pairs).unsqueeze(1)
    summed = weighted.new_zeros((len(hidden), weighted.shape[1])).index_add(0, tokens, weighted)
    return summed.to(hidden.dtype)


def _computed(
    called: CalledModule,
    rows: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    own: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """What this device's experts make of rows, of which each has one, unweighted."""
    made = torch.empty_like(rows)
    if len(rows):
        module = copy.copy(called.module)
        module.num_experts = len(own[f"{OWN}down_proj"])  # type: ignore[assignment]
        made = CalledModule(module)(rows, chosen.unsqueeze(1), weights.new_ones((len(rows), 1)), **own)
    return _reached(made, (rows,), own, is_idle=not len(rows))
