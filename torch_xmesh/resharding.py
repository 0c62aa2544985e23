"""``reshard`` and ``reshard_many``: DTensors in, DTensors on another mesh out."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from torch_xmesh import _C
from torch_xmesh.group import GroupReshards, reshards_of
from torch_xmesh.plan import placements_per_tensor
from torch_xmesh.spec import (
    AnyMesh,
    Spec,
    core_spec,
    device_mesh,
    empty_local,
    mesh_grid,
    normal_placements,
    wrap_local,
)
from torch_xmesh.topology import Topology

Source = DTensor | Spec
_MAX_PLANS = 4096
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Arguments:
    """One call's arguments, checked and in normal form; equal ones share a plan."""

    sources: tuple[Spec, ...]
    dst_meshes: tuple[AnyMesh, ...]
    placements: tuple[tuple[Placement, ...], ...]
    strategy: str
    topology: Topology | None
    is_backward: bool

    def ranks(self) -> list[int]:
        meshes = {mesh_grid(mesh) for mesh in self.dst_meshes} | {mesh_grid(source.mesh) for source in self.sources}
        return sorted({rank for mesh in meshes for rank in mesh.ranks})

    def requires_grad(self) -> str:
        return "".join("1" if source.requires_grad else "0" for source in self.sources)


@dataclass
class _Prepared:
    """What a plan's calls share on this rank."""

    core: "_C.PreparedPlan | None"  # None on a rank of neither mesh
    arguments: _Arguments
    dst_shapes: list[list[int] | None]


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
                _refuse(reshards, list(xs.values()), dst_mesh, str(error))
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
            prepared = _prepare(reshards, arguments)
            wants_grad = any(source.requires_grad for source in arguments.sources)
            if wants_grad and (async_op or outs is not None):
                option = "async_op=True" if async_op else "out="
                raise ValueError(f"{option} cannot be used with a tensor that requires grad: detach it first")
            if outs is not None:
                _check_outs(xs, outs, prepared)
        except ValueError as error:
            _refuse(reshards, xs, dst_mesh, str(error))
            raise
        call = _Call(reshards, prepared)
        if wants_grad:
            tensors = [_placeholder(x) if isinstance(x, Spec) else x for x in xs]
            return list(_Reshard.apply(call, *tensors)), None  # type: ignore[no-untyped-call]
        results = call.run(xs, outs)
        if not async_op:
            call.wait()
        return results, call.work


def _normal_arguments(
    xs: list[Source], dst_mesh: AnyMesh, dst_placements: Any, strategy: object, topology: Topology | None
) -> _Arguments:
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
    return _Arguments(tuple(sources), meshes, normal, _canonical(str(strategy)), topology, is_backward=False)


_canonical = functools.lru_cache(maxsize=256)(_C.canonical_strategy)


def _prepare(reshards: GroupReshards, arguments: _Arguments) -> _Prepared:
    known = reshards.plans.get(arguments)
    if isinstance(known, _Prepared):
        return known
    ranks = arguments.ranks()
    sources = arguments.sources
    targets = [
        core_spec(source.shape, source.dtype, mesh, placements)
        for source, mesh, placements in zip(sources, arguments.dst_meshes, arguments.placements, strict=True)
    ]
    strangers = [rank for rank in ranks if rank not in reshards.ranks]
    if strangers:
        raise ValueError(
            f"rank {strangers[0]} of a mesh is not in the process group, which has {len(reshards.ranks)} ranks"
        )
    me = reshards.core.global_rank
    core = None
    if me in ranks:
        links = (arguments.topology or Topology()).links
        if arguments.topology is not None and arguments.topology.knows_hosts:
            topology = arguments.topology.to_core(ranks)
        else:
            discovered = reshards.core.topology(ranks, links)
            topology = discovered if arguments.topology is None else arguments.topology.to_core(ranks, discovered)
        pairs = [(source.to_core(), target) for source, target in zip(sources, targets, strict=True)]
        plan = _C.plan_resharding(pairs, topology, arguments.strategy)
        core = reshards.core.prepare(plan, arguments.requires_grad(), arguments.is_backward)
    prepared = _Prepared(core, arguments, [target.local_shape(me) for target in targets])
    if len(reshards.plans) >= _MAX_PLANS:
        reshards.plans.pop(next(iter(reshards.plans)))
    reshards.plans[arguments] = prepared
    return prepared


def _refuse(reshards: GroupReshards, xs: list[Any], dst_mesh: Any, text: str) -> None:
    """Tells the other participants, as far as they can be known, that this rank's call will not come."""
    ranks: set[int] = set()
    is_named = len(xs) > 0
    for mesh in [dst_mesh, *(getattr(x, "device_mesh", getattr(x, "mesh", None)) for x in xs)]:
        try:
            ranks.update(mesh_grid(mesh).ranks)
        except (ValueError, TypeError):
            is_named = False
    members = sorted(rank for rank in ranks if rank in reshards.ranks)
    if is_named and len(members) == len(ranks):
        reshards.core.refuse(members, text)
    else:
        reshards.core.refuse_unnamed(members, text)


def _check_outs(xs: list[Source], outs: list[DTensor], prepared: _Prepared) -> None:
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


class _Call:
    """One call in flight."""

    def __init__(self, reshards: GroupReshards, prepared: _Prepared) -> None:
        self._reshards = reshards
        self._prepared = prepared
        self.work: Any = _CompletedWork()
        self.key: Any = None

    @property
    def arguments(self) -> _Arguments:
        return self._prepared.arguments

    def run(
        self, xs: Sequence[Source], outs: list[DTensor] | None, forward: Any = None, is_detached: bool = False
    ) -> list[DTensor]:
        """Starts the call; the results' memory is filled when it ends."""
        arguments = self.arguments
        locals_in = [x._local_tensor.detach() if isinstance(x, DTensor) else torch.empty(0, dtype=x.dtype) for x in xs]
        if outs is not None:
            locals_out = [out._local_tensor.detach() for out in outs]
        else:
            locals_out = [
                empty_local(source.shape, source.dtype) if shape is None else torch.empty(shape, dtype=source.dtype)
                for shape, source in zip(self._prepared.dst_shapes, arguments.sources, strict=True)
            ]
        if self._prepared.core is not None:
            try:
                self.work = self._reshards.core.begin(self._prepared.core, locals_in, locals_out, forward, is_detached)
            except ValueError as error:
                self._reshards.core.refuse(arguments.ranks(), str(error))
                raise
            self.key = _C.call_key(self.work)
        if outs is not None:
            return list(outs)
        targets = zip(locals_out, arguments.sources, arguments.dst_meshes, arguments.placements, strict=True)
        return [
            wrap_local(local, source.shape, device_mesh(mesh), placements)
            for local, source, mesh, placements in targets
        ]

    def wait(self) -> None:
        self.work.wait()

    def backward(self, gradients: Sequence[Any], zeros: Sequence[DTensor]) -> list[DTensor]:
        """The gradients on the source mesh, of those tensors that require one, in order."""
        arguments = self.arguments
        chosen = [i for i, source in enumerate(arguments.sources) if source.requires_grad]
        incoming = [zeros[i] if gradients[i] is None else gradients[i] for i in chosen]
        for i, gradient in zip(chosen, incoming, strict=True):
            if not isinstance(gradient, DTensor):
                raise RuntimeError(
                    f"the gradient of tensor {i} is a plain {type(gradient).__name__}, expected a DTensor"
                )
        sources = [arguments.sources[i] for i in chosen]
        back = _Arguments(
            tuple(Spec.of(gradient).without_grad() for gradient in incoming),
            tuple(source.mesh for source in sources),
            tuple(tuple(Replicate() if isinstance(p, Partial) else p for p in source.placements) for source in sources),
            arguments.strategy,
            arguments.topology,
            is_backward=True,
        )
        with self._reshards as reshards:
            call = _Call(reshards, _prepare(reshards, back))
            # A rank that only gives gradients waits for nobody: so backwards may run in any order on it.
            me = reshards.core.global_rank
            gives_only = all(me not in mesh_grid(mesh).ranks for mesh in back.dst_meshes)
            results = call.run(incoming, None, self.key, gives_only)
            if not gives_only:
                call.wait()
        return results


class _CompletedWork:
    """The Work of a rank that takes no part."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


def _placeholder(spec: Spec) -> DTensor:
    """An empty DTensor for a rank that passes a spec: the leaf that its backward ends in."""
    mesh = device_mesh(spec.mesh)
    empty = wrap_local(empty_local(spec.shape, spec.dtype), spec.shape, mesh, spec.placements)
    empty.requires_grad_(spec.requires_grad)
    return empty


class _Reshard(torch.autograd.Function):
    """The identity on the global tensors."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *xs: DTensor) -> tuple[DTensor, ...]:
        results = call.run(xs, None)
        call.wait()
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.results = [(y.shape, y.dtype, y.device_mesh, y.placements, y._local_tensor.shape) for y in results]
        flags = [source.requires_grad for source in call.arguments.sources]
        ctx.mark_non_differentiable(*(y for y, wanted in zip(results, flags, strict=True) if not wanted))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: DTensor | None) -> tuple[Any, ...]:
        call: _Call = ctx.call
        zeros = [
            wrap_local(torch.zeros(local_shape, dtype=dtype), shape, mesh, placements)
            for shape, dtype, mesh, placements, local_shape in ctx.results
        ]
        found = iter(call.backward(gradients, zeros))
        return (None, *(next(found) if source.requires_grad else None for source in call.arguments.sources))
