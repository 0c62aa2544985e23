"""One call of a reshard on this rank: its normal form, the plan that equal calls share, its run, and its backward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import _register_work
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.utils import _pytree as pytree

from torch_xmesh import _C
from torch_xmesh.group import GroupReshards, core_topology
from torch_xmesh.spec import AnyMesh, Spec, core_spec, device_mesh, empty_local, mesh_grid, wrap_local
from torch_xmesh.tensor_tree import Source, TensorTree
from torch_xmesh.topology import Topology

_MAX_PLANS = 4096


@dataclass(frozen=True)
class Arguments:
    """One call's arguments, checked and in normal form; equal ones share a plan."""

    sources: tuple[Spec, ...]
    dst_meshes: tuple[AnyMesh, ...]
    placements: tuple[tuple[Placement, ...], ...]
    strategy: str
    topology: Topology | None
    is_backward: bool
    labels: tuple[str, ...] = ()  # one name per tensor; empty: by number
    entries: tuple[tuple[str, str], ...] = ()  # what ranks compare besides, before the tensors

    def ranks(self) -> list[int]:
        meshes = {mesh_grid(mesh) for mesh in self.dst_meshes} | {mesh_grid(source.mesh) for source in self.sources}
        return sorted({rank for mesh in meshes for rank in mesh.ranks})

    def requires_grad(self) -> str:
        return "".join("1" if source.requires_grad else "0" for source in self.sources)


@dataclass
class Prepared:
    """What a plan's calls share on this rank."""

    core: "_C.PreparedPlan | None"  # None on a rank of neither mesh
    arguments: Arguments
    dst_shapes: list[list[int] | None]


def prepare(reshards: GroupReshards, arguments: Arguments) -> Prepared:
    """What calls with these arguments share, planned once. ValueError for arguments that no plan serves."""
    known = reshards.plans.get(arguments)
    if isinstance(known, Prepared):
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
        topology = core_topology(reshards.core, ranks, arguments.topology)
        pairs = [(source.to_core(), target) for source, target in zip(sources, targets, strict=True)]
        plan = _C.plan_resharding(pairs, topology, arguments.strategy)
        core = reshards.core.prepare(
            plan, arguments.requires_grad(), arguments.is_backward, arguments.labels, arguments.entries
        )
    prepared = Prepared(core, arguments, [target.local_shape(me) for target in targets])
    if len(reshards.plans) >= _MAX_PLANS:
        reshards.plans.pop(next(iter(reshards.plans)))
    reshards.plans[arguments] = prepared
    return prepared


def refuse(reshards: GroupReshards, xs: Any, dst_mesh: Any, text: str) -> None:
    """Tells the other participants, as far as they can be known, that this rank's call will not come."""
    meshes, is_named = _meshes_of_sources(xs)
    found = pytree.tree_leaves(dst_mesh)
    ranks: set[int] = set()
    for mesh in [*meshes, *found]:
        try:
            ranks.update(mesh_grid(mesh).ranks)
        except (ValueError, TypeError):
            is_named = False
    members = sorted(rank for rank in ranks if rank in reshards.ranks)
    if is_named and found and len(members) == len(ranks):
        reshards.core.refuse(members, text)
    else:
        reshards.core.refuse_unnamed(members, text)


def _meshes_of_sources(xs: Any) -> tuple[list[Any], bool]:
    """The source meshes that can be seen, and whether these are all."""
    try:
        sources = TensorTree(xs).tensors
    except ValueError:
        found = [x for x in pytree.tree_leaves(xs) if isinstance(x, DTensor | Spec)]
        return [x.device_mesh if isinstance(x, DTensor) else x.mesh for x in found], False
    return [x.device_mesh if isinstance(x, DTensor) else x.mesh for x in sources], len(sources) > 0


class Call:
    """One call in flight."""

    def __init__(self, reshards: GroupReshards, prepared: Prepared) -> None:
        self._reshards = reshards
        self._prepared = prepared
        self.work: Any = _CompletedWork()
        self.key: Any = None

    @property
    def arguments(self) -> Arguments:
        return self._prepared.arguments

    def run(
        self, xs: Sequence[Source], outs: list[DTensor] | None, forward: Any = None, is_detached: bool = False
    ) -> list[DTensor]:
        """Starts the call; the results' memory is filled when it ends."""
        arguments = self.arguments
        locals_in = [local_of(x) if isinstance(x, DTensor) else torch.empty(0, dtype=x.dtype) for x in xs]
        if outs is not None:
            locals_out = [local_of(out) for out in outs]
        else:
            locals_out = [
                empty_local(source.shape, source.dtype) if shape is None else torch.empty(shape, dtype=source.dtype)
                for shape, source in zip(self._prepared.dst_shapes, arguments.sources, strict=True)
            ]
        if self._prepared.core is not None:
            try:
                self.work = self._reshards.core.begin(self._prepared.core, locals_in, locals_out, forward, is_detached)
            except ValueError as error:
                if forward is None:  # a backward is no call that the others count
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
        back = Arguments(
            tuple(Spec.of(gradient).without_grad() for gradient in incoming),
            tuple(source.mesh for source in sources),
            tuple(tuple(Replicate() if isinstance(p, Partial) else p for p in source.placements) for source in sources),
            arguments.strategy,
            arguments.topology,
            is_backward=True,
            labels=tuple(arguments.labels[i] for i in chosen) if arguments.labels else (),
        )
        with self._reshards as reshards:
            reshards.raise_late_failure()
            call = Call(reshards, prepare(reshards, back))
            # Backwards run in any order on any rank: who gives waits for nobody, who receives waits when it looks.
            results = call.run(incoming, None, self.key, is_detached=True)
            waiting = [result._local_tensor for result in results if result._local_tensor.numel() > 0]
            reshards.unwatched.append((call.work, waiting))
        return [_when_looked_at(result, call.work) for result in results]


def _when_looked_at(x: DTensor, work: Any) -> DTensor:
    """The same tensor, whose first use waits for `work`."""
    local = x._local_tensor
    if local.numel() > 0:
        _register_work(local, work)
        x._local_tensor = AsyncCollectiveTensor(local)
    return x


def local_of(x: DTensor) -> torch.Tensor:
    """The local tensor without its graph, with its bytes in it."""
    local = x._local_tensor
    return (local.trigger_wait() if isinstance(local, AsyncCollectiveTensor) else local).detach()


class _CompletedWork:
    """The Work of a rank that takes no part."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class DifferentiableReshard(torch.autograd.Function):
    """The identity on the global tensors."""

    @staticmethod
    def forward(ctx: Any, call: Call, is_async: bool, *xs: DTensor) -> tuple[DTensor, ...]:
        results = call.run(xs, None)
        if not is_async:
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
        call: Call = ctx.call
        zeros = [
            wrap_local(torch.zeros(local_shape, dtype=dtype), shape, mesh, placements)
            for shape, dtype, mesh, placements, local_shape in ctx.results
        ]
        found = iter(call.backward(gradients, zeros))
        return (None, None, *(next(found) if source.requires_grad else None for source in call.arguments.sources))
