"""One call of a reshard on this rank: its run, its refusal, and its backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import _register_work
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils import _pytree as pytree

from torch_xmesh import _C
from torch_xmesh.errors import PeerError
from torch_xmesh.group import GroupReshards
from torch_xmesh.known_calls import KnownCall
from torch_xmesh.plan_cache import Move, PlanRequest
from torch_xmesh.spec import Spec, mesh_grid, wrap_local
from torch_xmesh.tensor_tree import Source, TensorTree


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


def check_devices(reshards: GroupReshards, kinds: frozenset[str]) -> None:
    """NotImplementedError for tensors on a device that nothing here moves."""
    for kind in kinds - {"cpu"}:
        if (len(kinds) == 1 or kind == "meta") and not reshards.backend.carries(torch.device(kind)):
            raise NotImplementedError(
                "only cpu tensors can be resharded unless Options.inner names the c10d backend that moves those of "
                "another device (cuda's is nccl unless it says so), and that is there when the group is made: for "
                f"{kind} it is not"
            )
        is_capturing = getattr(getattr(torch, kind, None), "is_current_stream_capturing", None)
        if is_capturing is not None and is_capturing():
            raise NotImplementedError(
                "a reshard cannot be captured in a graph: its ranks first agree on it, which takes messages between "
                "hosts"
            )


class CallInFlight:
    """One call in flight."""

    def __init__(self, reshards: GroupReshards, known: KnownCall) -> None:
        self.known = known
        self._reshards = reshards
        self.work: Any = _CompletedWork()

    def run(
        self, xs: Sequence[Source], outs: list[DTensor] | None, forward: Any = None, is_detached: bool = False
    ) -> list[DTensor]:
        """Starts the call; the results' memory is filled when it ends."""
        prepared, core = self.known.prepared.core, self._reshards.core
        try:
            if outs is None:
                locals_out, results = self.known.results.make()
            else:
                locals_out, results = _C.local_tensors(outs), outs
            if prepared is not None:
                locals_in = _C.local_tensors(xs)
                self.work = core.begin(prepared, locals_in, locals_out, forward, is_detached, outs is not None)
        except PeerError:
            raise
        except Exception as error:  # no memory, among others
            if forward is None and prepared is not None:  # a backward is no call that the others count
                core.refuse(self.known.request.ranks(), str(error))
            raise
        return results

    def wait(self) -> None:
        self.work.wait()
        if self.known.prepared.core is not None and self.known.fills_device:  # it may fail later
            self._reshards.unwatched.append((self.work, []))

    def backward(self, gradients: Sequence[Any]) -> list[DTensor]:
        """The gradients on the source mesh, of those tensors that require one, in order."""
        request = self.known.request
        chosen = [i for i, move in enumerate(request.moves) if move.src.requires_grad]
        incoming = [gradients[i] for i in chosen]
        if any(gradient is None for gradient in incoming):
            locals_, zeros = self.known.results.make()
            torch._foreach_zero_(locals_)
            incoming = [zeros[i] if gradients[i] is None else gradients[i] for i in chosen]
        for i, gradient in zip(chosen, incoming, strict=True):
            if not isinstance(gradient, DTensor):
                raise RuntimeError(
                    f"the gradient of tensor {i} is a plain {type(gradient).__name__}, expected a DTensor"
                )

        def way_back() -> PlanRequest:
            return PlanRequest(
                tuple(
                    Move(Spec.of(gradient).without_grad(), _gradient_spec(request.moves[i].src, gradient))
                    for i, gradient in zip(chosen, incoming, strict=True)
                ),
                request.plan_options,
                is_backward=True,
                labels=tuple(request.labels[i] for i in chosen) if request.labels else (),
            )

        with self._reshards as reshards:
            reshards.raise_late_failure()
            call = CallInFlight(reshards, reshards.calls.backward(reshards.plans, self.known, incoming, way_back))
            forward = None if self.known.prepared.core is None else _C.call_key(self.work)
            # Backwards run in any order on any rank: who gives waits for nobody, who receives waits when it looks.
            results = call.run(incoming, None, forward, is_detached=True)
            waiting = [result._local_tensor for result in results if result._local_tensor.numel() > 0]
            reshards.unwatched.append((call.work, waiting))
        return [_when_looked_at(result, call.work) for result in results]


def _gradient_spec(source: Spec, gradient: DTensor) -> Spec:
    """Where the gradient of a source belongs."""
    placements = tuple(Replicate() if isinstance(p, Partial) else p for p in source.placements)
    return Spec.unchecked(source.shape, gradient.dtype, source.mesh, placements)


def _when_looked_at(x: DTensor, work: Any) -> DTensor:
    """The same tensor, whose first use waits for `work`."""
    local = x._local_tensor
    if local.numel() > 0:
        _register_work(local, work)
        x._local_tensor = AsyncCollectiveTensor(local)
    return x


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
    def forward(ctx: Any, call: CallInFlight, is_async: bool, *xs: DTensor) -> tuple[DTensor, ...]:
        results = call.run(xs, None)
        if not is_async:
            call.wait()
        ctx.call = call
        ctx.source_devices = [x.device.type for x in xs]
        ctx.set_materialize_grads(False)
        flags = [move.src.requires_grad for move in call.known.request.moves]
        ctx.mark_non_differentiable(*(y for y, wanted in zip(results, flags, strict=True) if not wanted))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: DTensor | None) -> tuple[Any, ...]:
        call: CallInFlight = ctx.call
        found = iter(call.backward(gradients))
        return (
            None,
            None,
            *(
                _on_kind(next(found), kind) if move.src.requires_grad else None
                for move, kind in zip(call.known.request.moves, ctx.source_devices, strict=True)
            ),
        )


def _on_kind(gradient: DTensor, kind: str) -> DTensor:
    """The gradient on the kind of device that its source is on, as autograd asks for.

    They differ where DTensor has computed the source and this rank is not in its mesh: an empty tensor on cpu then.
    """
    if gradient.device.type == kind:
        return gradient
    local = gradient._local_tensor.to(kind)
    return wrap_local(local, gradient.shape, gradient.device_mesh, gradient.placements)
