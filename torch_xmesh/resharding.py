"""``reshard`` and ``reshard_many``: DTensors in, DTensors on another mesh out."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement

from torch_xmesh import _C
from torch_xmesh.group import reshards_of
from torch_xmesh.plan import placements_per_tensor
from torch_xmesh.reshard_call import Arguments, Call, DifferentiableReshard, Prepared, Source, prepare, refuse
from torch_xmesh.spec import (
    AnyMesh,
    Spec,
    device_mesh,
    empty_local,
    mesh_grid,
    normal_placements,
    wrap_local,
)
from torch_xmesh.topology import Topology

_T = TypeVar("_T")


def reshard(
    x: Source,
    dst_mesh: AnyMesh,
    dst_placements: Sequence[Placement],
    *,
    strategy: object = "auto",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    out: DTensor | None = None,
    topology: Topology | None = None,
) -> Any:
    """Moves a DTensor to another mesh and placement. Called by every rank of either mesh with equal arguments.

    Args:
        x: the DTensor on its source mesh; a rank outside that mesh passes the DTensor with an empty local tensor, or a
            :class:`Spec`. Any dtype, 0 to 8 dims, uneven and empty shards, any strides.
        dst_mesh: a ``DeviceMesh`` or :class:`Mesh`; may be disjoint from, overlap or equal the source mesh.
        dst_placements: Shard, Replicate or _StridedShard per axis of ``dst_mesh`` (not Partial).
        strategy: "auto", "broadcast", "send_recv", ... (see :func:`plan_resharding`), or an options object.
        group: a process group on ``xmesh`` with every rank of both meshes; None is the default group.
        async_op: return at once with a Work; ``x`` and the result belong to the operation until ``Work.wait()``.
        out: a DTensor on ``dst_mesh`` with these placements; its local tensor receives the bytes. Builds no graph.
        topology: hosts and link speeds; default: hosts as discovered, nominal speeds.

    Returns:
        the DTensor on ``dst_mesh`` (with an empty local tensor on ranks outside it); with ``async_op`` a pair of it and
        a ``torch.distributed.Work``. Differentiable like ``DTensor.redistribute``: the identity on the global tensor;
        the gradient goes back to the source mesh and placements (Replicate where the source was Partial). Every
        participant must run backward, source-only ranks through their empty result.

    Raises:
        ValueError: a mistake in the arguments, or ranks that disagree (on every rank that calls).
        PeerError: a rank died, is stopped, or did not make the same call within the group's timeout.
        RuntimeError: the group is closed, or two threads use it at once.

    Floating Partial sums are added in one fixed order, bf16 and fp16 in fp32: all replicas are bitwise equal.
    """
    outs = None if out is None else [out]
    results, work = _reshard([x], dst_mesh, dst_placements, strategy, group, async_op, outs, topology)
    return (results[0], work) if async_op else results[0]


def reshard_many(
    xs: Sequence[Source] | Mapping[str, Source],
    dst_mesh: AnyMesh,
    dst_placements: Any,
    *,
    strategy: object = "auto",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    out: Any = None,
    topology: Topology | None = None,
) -> Any:
    """Moves many DTensors in one plan that is balanced across them; otherwise like :func:`reshard`.

    Args:
        xs: a list or a dict of DTensors or specs, the same on every rank and in the same order.
        dst_placements: placements for all, or per tensor: a list, or a dict with the keys of ``xs``.
        out: a list or dict of DTensors like ``xs``.

    Returns:
        a list or dict like ``xs``; with ``async_op`` a pair of it and a Work.

    Raises:
        As :func:`reshard`; ValueError also for an empty list or keys that do not match.
    """
    if isinstance(xs, Mapping):
        keys = list(xs)
        try:
            placements = (
                _in_key_order(dst_placements, keys, "dst_placements")
                if isinstance(dst_placements, Mapping)
                else dst_placements
            )
            outs = None if out is None else _in_key_order(out, keys, "out")
        except ValueError as error:
            with reshards_of(group) as reshards:
                refuse(reshards, list(xs.values()), dst_mesh, str(error))
            raise
        results, work = _reshard(list(xs.values()), dst_mesh, placements, strategy, group, async_op, outs, topology)
        named = dict(zip(keys, results, strict=True))
        return (named, work) if async_op else named
    outs = None if out is None else list(out)
    results, work = _reshard(list(xs), dst_mesh, dst_placements, strategy, group, async_op, outs, topology)
    return (results, work) if async_op else results


def _in_key_order(values: Mapping[str, _T], keys: list[str], what: str) -> list[_T]:
    if set(values) != set(keys):
        odd = sorted(set(values) ^ set(keys))
        raise ValueError(f"{what} and the tensors have different keys: {odd[0]!r} is in one of them only")
    return [values[key] for key in keys]


def _reshard(
    xs: list[Source],
    dst_mesh: AnyMesh,
    dst_placements: Any,
    strategy: object,
    group: dist.ProcessGroup | None,
    async_op: bool,
    outs: list[DTensor] | None,
    topology: Topology | None,
) -> tuple[list[DTensor], Any]:
    with reshards_of(group) as reshards:
        try:
            arguments = _normal_arguments(xs, dst_mesh, dst_placements, strategy, topology)
            prepared = prepare(reshards, arguments)
            wants_grad = any(source.requires_grad for source in arguments.sources)
            if wants_grad and (async_op or outs is not None):
                option = "async_op=True" if async_op else "out="
                raise ValueError(f"{option} cannot be used with a tensor that requires grad: detach it first")
            if outs is not None:
                _check_outs(xs, outs, prepared)
        except ValueError as error:
            refuse(reshards, xs, dst_mesh, str(error))
            raise
        call = Call(reshards, prepared)
        if wants_grad:
            tensors = [_placeholder(x) if isinstance(x, Spec) else x for x in xs]
            return list(DifferentiableReshard.apply(call, *tensors)), None  # type: ignore[no-untyped-call]
        results = call.run(xs, outs)
        if not async_op:
            call.wait()
        return results, call.work


def _normal_arguments(
    xs: list[Source], dst_mesh: AnyMesh, dst_placements: Any, strategy: object, topology: Topology | None
) -> Arguments:
    if not xs:
        raise ValueError("there is no tensor to reshard: the list is empty")
    for i, x in enumerate(xs):
        if not isinstance(x, DTensor | Spec):
            raise ValueError(f"tensor {i}: expected a DTensor or an xm.Spec, got {type(x).__name__}")
    enabled = torch.is_grad_enabled()
    specs = [Spec.of(x) if isinstance(x, DTensor) else x for x in xs]
    sources = specs if enabled else [spec.without_grad() for spec in specs]
    placements = placements_per_tensor(dst_placements, len(xs))
    normal = tuple(normal_placements(p, len(s.shape)) for p, s in zip(placements, sources, strict=True))
    mesh_grid(dst_mesh)
    meshes = (dst_mesh,) * len(xs)
    return Arguments(tuple(sources), meshes, normal, _canonical(str(strategy)), topology, is_backward=False)


_canonical = functools.lru_cache(maxsize=256)(_C.canonical_strategy)


def _check_outs(xs: list[Source], outs: list[DTensor], prepared: Prepared) -> None:
    arguments = prepared.arguments
    if len(outs) != len(arguments.sources):
        raise ValueError(f"out= has {len(outs)} tensors, expected {len(arguments.sources)}")
    for i, (out, source, placements) in enumerate(zip(outs, arguments.sources, arguments.placements, strict=True)):
        if not isinstance(out, DTensor):
            raise ValueError(f"out= of tensor {i}: expected a DTensor, got {type(out).__name__}")
        if out.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"out= of tensor {i} requires grad: detach it first")
        expected = Spec(source.shape, source.dtype, arguments.dst_meshes[i], placements)
        given = Spec.of(out).without_grad()
        if given != expected:
            raise ValueError(f"out= of tensor {i}: expected {expected}, got {given}")
    held = {_memory_of(x) for x in xs if isinstance(x, DTensor) and x._local_tensor.numel() > 0}
    for i, out in enumerate(outs):
        if out._local_tensor.numel() > 0 and _memory_of(out) in held:
            raise ValueError(
                f"out= of tensor {i} shares memory with a source: its bytes would be overwritten while in use"
            )


def _memory_of(x: DTensor) -> int:
    return x._local_tensor.untyped_storage().data_ptr()


def _placeholder(spec: Spec) -> DTensor:
    """An empty DTensor for a rank that passes a spec: the leaf that its backward ends in."""
    mesh = device_mesh(spec.mesh)
    empty = wrap_local(empty_local(spec.shape, spec.dtype), spec.shape, mesh, spec.placements)
    empty.requires_grad_(spec.requires_grad)
    return empty
