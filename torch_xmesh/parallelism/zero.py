"""Parameters that devices hold whole are held in parts: S. Rajbhandari et al., ZeRO (SC 2020), as a pass behind the
search. Where devices add up a parameter's gradients each can keep a part of what belongs to the parameter:

level  optimizer states  gradients  parameter   collectives, of the gradient (g) and the parameter (p)
1      parts             whole      whole       a step: reduce-scatter g, all-gather p
2      parts             parts      whole       a microbatch: reduce-scatter g;                  a step: all-gather p
3      parts             parts      parts       a microbatch: all-gather p twice, reduce-scatter g

(once where backward does not read it, as it does not read what is added.)
"""

import dataclasses

from torch_xmesh.parallelism.loops import PARTIAL, REPLICATED, State
from torch_xmesh.parallelism.memory import STATES, Bytes
from torch_xmesh.parallelism.objective import Seconds
from torch_xmesh.parallelism.operators import Value
from torch_xmesh.parallelism.sharded import InParts, Sharded
from torch_xmesh.parallelism.space import CollectiveUse, Space
from torch_xmesh.parallelism.stretch import Stretch

LEVELS = (1, 2, 3)


def with_zero(sharded: Sharded, level: int) -> Sharded:
    """The same with parameters in parts at this level, those that can be; at level 1 those only for which it takes no
    longer.

    Raises:
        ValueError: no such level.
    """
    if level not in LEVELS:
        raise ValueError(f"a level of ZeRO is one of {LEVELS}, got {level!r}")
    space, stretch = sharded.graph.space, sharded.graph.stretch
    in_parts = dict(sharded.in_parts)
    held, cost = sharded.bytes, sharded.cost
    for name, (value, state) in sharded.parameters.items():
        gradient = sharded.gradients.get(name)
        if gradient is None or name in in_parts:
            continue
        own = level_of(level, value, stretch)
        found = in_parts_of(space, value, state, gradient, own, value in stretch.read_back)
        if found is not None:
            in_parts[name] = found
            held += found.bytes
            cost += found.cost
    out = dataclasses.replace(sharded, bytes=held, cost=cost, in_parts=in_parts)
    return dataclasses.replace(out, bytes=dataclasses.replace(held, again=out.again_bytes)) if level == 3 else out


def level_of(level: int, value: Value, stretch: Stretch) -> int:
    """That of one parameter: of which operators keep views is whole from forward to backward, and through the step."""
    return min(level, 2) if value in stretch.kept_views else level


def in_parts_of(
    space: Space, value: Value, state: State, gradient: State, level: int, is_read_back: bool
) -> InParts | None:
    """What changes for one parameter; None where it stays as it is. Equal parameters share what is computed."""

    def make() -> InParts | None:
        parts = parts_of(value, state, gradient, space.shape)
        if parts is None:
            return None
        after = _collectives(space, value, gradient, parts, state, level, is_read_back)
        old = _seconds(space, space.steps(value, "gradient", gradient, state))
        new = _seconds(space, after)
        if level == 1 and new.step_collectives > old.step_collectives * (1 + 1e-9):
            return None
        uses = tuple(dataclasses.replace(use, value="") for use in after)
        more = new + -old
        return InParts(level, parts, uses, more, space.cost(more), _saved(space, value, state, parts, level))

    key = ("in parts", value.shape, value.num_bytes, state, gradient, level, is_read_back)
    out: InParts | None = space.once(key, make)
    return out


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
    space: Space, value: Value, gradient: State, parts: State, state: State, level: int, is_read_back: bool
) -> list[CollectiveUse]:
    scatter = "gradient" if level == 1 else "backward"
    out = space.steps(value, scatter, gradient, parts)
    if level < 3:
        return [*out, *space.steps(value, "parameter", parts, state)]
    ways = ("forward", "backward") if is_read_back else ("forward",)
    return [*out, *(use for way in ways for use in space.steps(value, way, parts, state))]


def _seconds(space: Space, uses: list[CollectiveUse]) -> Seconds:
    by = {"forward": 0.0, "backward": 0.0, "step": 0.0}
    for use in uses:
        by[use.why if use.why in by else "step"] += space.shared_seconds(use)
    return Seconds(forward_collectives=by["forward"], backward_collectives=by["backward"], step_collectives=by["step"])


def _saved(space: Space, value: Value, state: State, parts: State, level: int) -> Bytes:
    """What a device holds more, which is less."""
    more = value.num_bytes / space.num_parts(parts) - value.num_bytes / space.num_parts(state)
    return Bytes(more if level == 3 else 0.0, more if level >= 2 else 0.0, STATES * more)
