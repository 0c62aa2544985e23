"""Parameters that devices hold whole are held in parts: S. Rajbhandari et al., ZeRO (SC 2020), as a pass behind the
search. Where devices add up a parameter's gradients each can keep a part of what belongs to the parameter:

level  optimizer states  gradients  parameter   collectives, of the gradient (g) and the parameter (p)
1      parts             whole      whole       a step: reduce-scatter g, all-gather p
2      parts             parts      whole       a microbatch: reduce-scatter g;                  a step: all-gather p
3      parts             parts      parts       a microbatch: all-gather p twice, reduce-scatter g
"""

import dataclasses

from torch_xmesh.parallelism.loops import PARTIAL, REPLICATED, State, num_parts
from torch_xmesh.parallelism.memory import STATES, Bytes
from torch_xmesh.parallelism.objective import Seconds
from torch_xmesh.parallelism.operators import Value
from torch_xmesh.parallelism.search import Sharded
from torch_xmesh.parallelism.space import CollectiveUse, Space

LEVELS = (1, 2, 3)


def with_zero(sharded: Sharded, space: Space, level: int) -> Sharded:
    """The same with parameters in parts at this level, those that can be; at level 1 those only for which it takes no
    longer.

    Raises:
        ValueError: no such level.
    """
    if level not in LEVELS:
        raise ValueError(f"a level of ZeRO is one of {LEVELS}, got {level!r}")
    collectives: list[CollectiveUse] = []
    replaced: set[str] = set()
    spent = list(sharded.spent)
    held = sharded.bytes
    levels, states = dict(sharded.zero_levels), dict(sharded.zero_states)
    first = {value.name: number for number, one in reversed(list(enumerate(sharded.operators))) for value in one.reads}
    for name, (value, state) in sharded.parameters.items():
        gradient = sharded.gradients.get(name)
        parts = None if gradient is None else parts_of(value, state, gradient, space.shape)
        if parts is None or name in levels or gradient is None:
            continue
        before = space.steps(value, "gradient", gradient, state)
        after = _collectives(space, value, gradient, parts, state, level)
        old, new = _seconds(space, before), _seconds(space, after)
        if level == 1 and new.step_collectives > old.step_collectives * (1 + 1e-9):
            continue
        replaced.add(name)
        collectives += after
        spent[first[name]] += new
        spent[first[name]] += -old
        held += _saved(value, state, parts, space.shape, level)
        levels[name], states[name] = level, parts

    def is_replaced(use: CollectiveUse) -> bool:
        return use.why == "gradient" and use.value in replaced

    total = sum(spent, Seconds())
    return dataclasses.replace(
        sharded,
        collectives=(*(one for one in sharded.collectives if not is_replaced(one)), *collectives),
        spent=tuple(spent),
        bytes=held,
        cost=space.cost(total),
        zero_levels=levels,
        zero_states=states,
    )


def parts_of(value: Value, state: State, gradient: State, mesh_shape: tuple[int, ...]) -> State | None:
    """How a parameter lies in parts: along each axis where it is whole and its gradient is in summands, by the first
    dim that the axis divides; None where there is none."""
    out = list(state)
    for axis, size in enumerate(mesh_shape):
        if state[axis] != REPLICATED or gradient[axis] != PARTIAL or size == 1:
            continue
        for dim, extent in enumerate(value.shape):
            cut = size
            for other, held in enumerate(out):
                cut *= mesh_shape[other] if held == dim else 1
            if extent % cut == 0:
                out[axis] = dim
                break
    return tuple(out) if tuple(out) != tuple(state) else None


def _collectives(
    space: Space, value: Value, gradient: State, parts: State, state: State, level: int
) -> list[CollectiveUse]:
    scatter = "gradient" if level == 1 else "backward"
    out = space.steps(value, scatter, gradient, parts)
    if level < 3:
        return [*out, *space.steps(value, "parameter", parts, state)]
    return [*out, *space.steps(value, "forward", parts, state), *space.steps(value, "backward", parts, state)]


def _seconds(space: Space, uses: list[CollectiveUse]) -> Seconds:
    by = {"forward": 0.0, "backward": 0.0, "step": 0.0}
    for use in uses:
        by[use.why if use.why in by else "step"] += space.collective_seconds(use)
    return Seconds(forward_collectives=by["forward"], backward_collectives=by["backward"], step_collectives=by["step"])


def _saved(value: Value, state: State, parts: State, mesh_shape: tuple[int, ...], level: int) -> Bytes:
    """What a device holds more, which is less."""
    more = value.num_bytes / num_parts(parts, mesh_shape) - value.num_bytes / num_parts(state, mesh_shape)
    return Bytes(more if level == 3 else 0.0, more if level >= 2 else 0.0, STATES * more)
