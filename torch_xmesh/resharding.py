"""``reshard`` and ``reshard_many``: DTensors in, DTensors on another mesh out."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement
from torch.utils import _pytree as pytree

from torch_xmesh import _C
from torch_xmesh.group import GroupReshards, reshards_of
from torch_xmesh.known_calls import KnownCall
from torch_xmesh.plan_cache import Move, PlanOptions, PlanRequest
from torch_xmesh.reshard_call import CallInFlight, DifferentiableReshard, check_devices, refuse
from torch_xmesh.spec import (
    AnyMesh,
    Mesh,
    Spec,
    core_spec,
    device_mesh,
    empty_local,
    mesh_grid,
    normal_placements,
    wrap_local,
)
from torch_xmesh.tensor_tree import Source, TensorTree, is_placements
from torch_xmesh.topology import Topology


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
        async_op: return at once with a Work; ``x`` and the result belong to the operation until ``Work.wait()``. The
            result has its place in autograd's graph at once.
        out: a DTensor on ``dst_mesh`` with these placements; its local tensor receives the bytes, once the ranks have
            agreed: a refused call leaves it as it was. Builds no graph. Shares no memory with ``x``, nor with itself.
        topology: hosts and link speeds; default: hosts as discovered, nominal speeds.

    Returns:
        the DTensor on ``dst_mesh`` (with an empty local tensor on ranks outside it); with ``async_op`` a pair of it and
        a ``torch.distributed.Work``. Differentiable like ``DTensor.redistribute``: the identity on the global tensor;
        the gradient goes back to the source mesh and placements (Replicate where the source was Partial). Every
        participant must run backward, source-only ranks through their empty result; several reshards' in any order.
        A gradient is waited for where it is first used: at the end for a leaf, at once inside a graph that goes on, or
        where it is added to another. Ranks that all wait so for each other's must come there in one order.

    Raises:
        ValueError: a mistake in the arguments, or ranks that disagree (on every rank that calls).
        PeerError: a rank died, is stopped, or did not make the same call within the group's timeout.
        RuntimeError: the group is closed, or two threads use it at once.

    Floating Partial sums are added in one fixed order, bf16 and fp16 in fp32: all replicas are bitwise equal.
    """
    outs = None if out is None else [out]
    results, work = _reshard(
        [x],
        True,
        dst_mesh=dst_mesh,
        dst_placements=dst_placements,
        strategy=strategy,
        group=group,
        async_op=async_op,
        out=outs,
        topology=topology,
    )
    return (results[0], work) if async_op else results[0]


def reshard_many(
    xs: Sequence[Any] | Mapping[Any, Any],
    dst_mesh: Any,
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
        xs: DTensors or specs in lists, tuples and dicts, nested as a state dict may be. Ranks compare the names: the
            order of a dict does not matter. What is no tensor is passed through; its name and type are compared.
        dst_mesh: a mesh for all, or a container of meshes.
        dst_placements: placements for all, or a container of placements. A container is shaped like ``xs``, with the
            same keys; a value where ``xs`` has a list or dict is for all tensors in it.
        strategy, group, async_op, topology: as in :func:`reshard`, for all tensors together.
        out: a container of DTensors shaped like ``xs``, which share no memory with each other.

    Returns:
        a container like ``xs``, in its order; with ``async_op`` a pair of it and a Work.

    Raises:
        As :func:`reshard`; ValueError also without a tensor, or for names that differ. A call that names no tensor is
        taken for the next one that others make with this rank and those of ``dst_mesh``.
    """
    return _reshard(
        xs,
        False,
        dst_mesh=dst_mesh,
        dst_placements=dst_placements,
        strategy=strategy,
        group=group,
        async_op=async_op,
        out=out,
        topology=topology,
    )


def _reshard(
    xs: Any,
    is_single: bool,
    *,
    dst_mesh: Any,
    dst_placements: Any,
    strategy: object,
    group: dist.ProcessGroup | None,
    async_op: bool,
    out: Any,
    topology: Topology | None,
) -> Any:
    """The results in a container like ``xs``; with ``async_op`` (or ``is_single``) a pair of it and a Work."""
    with reshards_of(group) as reshards:
        reshards.raise_late_failure()
        try:
            form = reshards.calls.form(xs, dst_mesh, dst_placements, out, (is_single, str(strategy), topology))
            known = None if form is None else reshards.calls.find(form)
            if form is None or known is None:
                if is_single:
                    _check_single(xs[0], dst_mesh)
                tree = TensorTree(xs)
                outs = None if out is None else _outs_in_order(tree, out)
                known = _new_call(reshards, tree, dst_mesh, dst_placements, PlanOptions.of(strategy, topology), outs)
                tensors = tree.tensors
                if form is not None:
                    known = _with_places(known, tree.places, dst_mesh, outs, form.outs)
                    if len(known.out_places) == len(outs or ()):
                        reshards.calls.keep(form, known)
            else:
                if known.mesh is not dst_mesh and isinstance(dst_mesh, torch.distributed.DeviceMesh):
                    known = known.on(dst_mesh)
                    reshards.calls.keep(form, known)
                leaves, given = form.leaves, form.outs
                tensors = [leaves[place] for place in known.places]
                outs = None if out is None else [given[place] for place in known.out_places]
                if known.devices != _ON_CPU:
                    check_devices(reshards, known.devices)
            if outs is not None:
                _check_memory(known.request, tensors, outs)
        except (ValueError, NotImplementedError) as error:
            refuse(reshards, xs, dst_mesh, str(error))
            raise
        call = CallInFlight(reshards, known)
        if known.wants_grad:
            recorded = [
                _placeholder(x, move.src_device) if isinstance(x, Spec) else x
                for x, move in zip(tensors, known.request.moves, strict=True)
            ]
            results = list(DifferentiableReshard.apply(call, async_op, *recorded))  # type: ignore[no-untyped-call]
        else:
            results = call.run(tensors, outs)
            if not async_op:
                call.wait()
        if is_single:
            return results, call.work
        moved = tree.rebuild(results) if form is None else _rebuilt(xs, form, known, results)
        return (moved, call.work) if async_op else moved


_ON_CPU = frozenset({"cpu"})


def _new_call(
    reshards: GroupReshards,
    tree: TensorTree,
    dst_mesh: Any,
    dst_placements: Any,
    plan_options: PlanOptions,
    outs: list[Any] | None,
) -> KnownCall:
    """The call that arguments come to, each of which is checked."""
    request = PlanRequest(
        _moves(tree, dst_mesh, dst_placements), plan_options, labels=tree.labels, entries=tree.entries
    )
    _check_specs(tree, reshards.core.global_rank)
    check_devices(reshards, request.devices())
    wants_grad = any(move.src.requires_grad for move in request.moves)
    known = KnownCall.of(reshards.plans, request, wants_grad=wants_grad)
    if outs is not None:
        if wants_grad:
            raise ValueError("out= cannot be used with a tensor that requires grad: detach it first")
        _check_outs(request, outs)
    return known


def _with_places(
    known: KnownCall, places: list[int], dst_mesh: Any, outs: list[Any] | None, found: list[Any]
) -> KnownCall:
    """The same call for other containers of this form. Without places of ``outs`` if one is there twice."""
    place_of = {id(out): place for place, out in enumerate(found)}
    out_places = [place_of[id(out)] for out in outs or ()] if len(place_of) == len(found) else []
    mesh = dst_mesh if isinstance(dst_mesh, torch.distributed.DeviceMesh) else None
    return dataclasses.replace(known, places=tuple(places), out_places=tuple(out_places), mesh=mesh)


def _rebuilt(xs: Any, form: "_C.NormalForm", known: KnownCall, results: list[DTensor]) -> Any:
    """A container like ``xs`` around the results."""
    leaves = form.leaves
    for place, result in zip(known.places, results, strict=True):
        leaves[place] = result
    return _C.rebuilt(xs, leaves)


def _check_single(x: Any, dst_mesh: Any) -> None:
    if not isinstance(x, DTensor | Spec):
        raise ValueError(f"tensor 0: expected a DTensor or an xm.Spec, got {type(x).__name__}")
    mesh_grid(dst_mesh)


def _check_specs(tree: TensorTree, rank: int) -> None:
    """A Spec stands for a tensor of which this rank has nothing."""
    for i, x in enumerate(tree.tensors):
        if isinstance(x, Spec) and rank in mesh_grid(x.mesh).ranks:
            shape = core_spec(x.shape, x.dtype, x.mesh, x.placements).local_shape(rank)
            if shape is not None and 0 not in shape:
                raise ValueError(
                    f"tensor {tree.label(i)}: rank {rank} is on the source mesh and holds {list(shape)} of it, but "
                    "passes an xm.Spec, which has no data: pass the DTensor there"
                )


def _moves(tree: TensorTree, dst_mesh: Any, dst_placements: Any) -> tuple[Move, ...]:
    if not tree.tensors:
        raise ValueError("there is no tensor to reshard: the list is empty")
    enabled = torch.is_grad_enabled()
    specs = [Spec.of(x) if isinstance(x, DTensor) else x for x in tree.tensors]
    sources = specs if enabled else [spec.without_grad() for spec in specs]
    if isinstance(dst_placements, Placement) or not isinstance(dst_placements, Sequence | Mapping):
        raise ValueError(
            f"destination placements are a sequence with one placement per mesh axis, got {dst_placements!r}"
        )
    placements = tree.spread(dst_placements, is_placements, "dst_placements", "one placement per mesh axis")
    normal = [normal_placements(p, len(s.shape)) for p, s in zip(placements, sources, strict=True)]
    return tuple(
        Move(source, Spec.unchecked(source.shape, source.dtype, mesh, target))
        for source, mesh, target in zip(sources, meshes_of(tree, dst_mesh), normal, strict=True)
    )


def meshes_of(tree: TensorTree, dst_mesh: Any) -> list[AnyMesh]:
    """The destination mesh of each tensor."""
    if not any(isinstance(leaf, Mesh | torch.distributed.DeviceMesh) for leaf in pytree.tree_leaves(dst_mesh)):
        mesh_grid(dst_mesh)  # says what was expected
    return tree.spread(dst_mesh, _is_mesh, "dst_mesh", "a mesh")


def _is_mesh(value: Any) -> bool:
    return isinstance(value, Mesh | torch.distributed.DeviceMesh)


def _outs_in_order(tree: TensorTree, out: Any) -> list[Any]:
    """The tensor to receive into, of each tensor."""
    if isinstance(out, torch.Tensor) or not isinstance(out, Sequence | Mapping):
        raise ValueError(f"out= is a container of DTensors like the tensors', got {type(out).__name__}")
    return tree.spread(out, lambda value: isinstance(value, torch.Tensor), "out=", "a DTensor")


def _check_outs(request: PlanRequest, outs: list[Any]) -> None:
    """Whether they are what the call would make."""
    for i, (given, move) in enumerate(zip(outs, request.moves, strict=True)):
        what = f"out= of tensor {request.label(i)}"
        if not isinstance(given, DTensor):
            raise ValueError(f"{what}: expected a DTensor, got {type(given).__name__}")
        if given.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{what} requires grad: detach it first")
        spec = Spec.of(given).without_grad()
        if spec != move.dst:
            raise ValueError(f"{what}: expected {move.dst}, got {spec}")


def _check_memory(request: PlanRequest, tensors: list[Source], outs: list[DTensor]) -> None:
    """A byte is written once, and never while it is read. Views of one tensor may lie beside each other."""
    sources = [i for i, x in enumerate(tensors) if isinstance(x, DTensor)]
    written = _C.local_tensors(outs)
    shared = _C.shared_memory(written, _C.local_tensors([tensors[i] for i in sources]))
    if shared is None:
        return
    first, second = shared
    what = f"out= of tensor {request.label(first)}"
    if first == second:
        raise ValueError(
            f"{what} shares memory with itself: expected a place for each element, got strides "
            f"{written[first].stride()} for shape {tuple(written[first].shape)}"
        )
    if second < len(outs):
        raise ValueError(
            f"{what} shares memory with out= of tensor {request.label(second)}: expected separate memory, each would "
            "overwrite the other"
        )
    raise ValueError(
        f"{what} shares memory with a source, tensor {request.label(sources[second - len(outs)])}: its bytes would be "
        "overwritten while in use"
    )


def _placeholder(spec: Spec, device_type: str) -> DTensor:
    """An empty DTensor for a rank that passes a spec: the leaf that its backward ends in."""
    mesh = device_mesh(spec.mesh, device_type)
    empty = wrap_local(empty_local(spec.shape, spec.dtype, device_type), spec.shape, mesh, spec.placements)
    empty.requires_grad_(spec.requires_grad)
    return empty
