"""Calls that came before: what equal arguments were checked and planned to."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_xmesh import _C
from torch_xmesh.devices import is_device_here
from torch_xmesh.plan_cache import Move, PlanRequest, Plans, Prepared, RecentlyUsed
from torch_xmesh.spec import Spec, device_mesh, dtensor_spec, empty_shape


@dataclasses.dataclass(frozen=True, slots=True)
class KnownCall:
    """What equal calls share on this rank; their arguments have passed all checks that look at no data.

    Attributes:
        request: what is moved, and how.
        prepared: its plan.
        results: makes the DTensors that a call without ``out=`` fills.
        devices: the kinds of devices that its tensors are on.
        fills_device: a result is on another device than the cpu.
        wants_grad: autograd records the call.
        places: position of each tensor among the leaves of the container that it came in.
        out_places: the same for ``out=``; empty without.
        mesh: the destination mesh where one is for all, which results lie on.
        backwards: the calls of its backward, by the normal form of the gradients.
    """

    request: PlanRequest
    prepared: Prepared
    results: "_C.ResultMaker"
    devices: frozenset[str]
    fills_device: bool
    wants_grad: bool = False
    places: tuple[int, ...] = ()
    out_places: tuple[int, ...] = ()
    mesh: Any = None
    backwards: "RecentlyUsed[bytes, KnownCall]" = dataclasses.field(default_factory=lambda: RecentlyUsed(8))

    @staticmethod
    def of(plans: Plans, request: PlanRequest, **found: Any) -> "KnownCall":
        """Plans the request. ValueError for one that no plan serves."""
        prepared = plans.prepare(request)
        fills_device = any(move.dst_device != "cpu" for move in request.moves)
        return KnownCall(request, prepared, _results(request, prepared), request.devices(), fills_device, **found)

    def on(self, mesh: Any) -> "KnownCall":
        """The same call for an equal destination mesh, which its results shall lie on."""
        moves = tuple(
            Move(move.src, Spec.unchecked(move.dst.shape, move.dst.dtype, mesh, move.dst.placements))
            for move in self.request.moves
        )
        request = dataclasses.replace(self.request, moves=moves)
        return dataclasses.replace(self, request=request, results=_results(request, self.prepared), mesh=mesh)


def _results(request: PlanRequest, prepared: Prepared) -> "_C.ResultMaker":
    results = []
    for move, shape in zip(request.moves, prepared.dst_shapes, strict=True):
        dst, device = move.dst, move.dst_device
        if shape is None and not is_device_here(device):
            device = "cpu"
        local_shape = empty_shape(dst.shape) if shape is None else shape
        spec = dtensor_spec(dst.shape, dst.dtype, device_mesh(dst.mesh, move.dst_device), dst.placements)
        results.append((local_shape, dst.dtype, device, spec))
    return _C.ResultMaker(results)


class KnownCalls:
    """The latest calls on one process group, which have at most so many tensors together. One thread at a time."""

    def __init__(self, most: int) -> None:
        self._forms = _C.NormalForms()
        self._calls: RecentlyUsed[bytes, KnownCall] = RecentlyUsed(most)

    def form(
        self, xs: Any, dst_mesh: Any, dst_placements: Any, out: Any, options: tuple[object, ...]
    ) -> "_C.NormalForm | None":
        """The normal form of a call's arguments. None for arguments that have to be looked at one by one."""
        return self._forms.of(xs, dst_mesh, dst_placements, out, options, torch.is_grad_enabled())

    def find(self, form: "_C.NormalForm") -> KnownCall | None:
        """What equal arguments came to."""
        return self._calls.get(form.key)

    def keep(self, form: "_C.NormalForm", call: KnownCall) -> None:
        """For the next call with equal arguments."""
        self._calls.put(form.key, call, len(call.request.moves))

    def backward(
        self, plans: Plans, forward: KnownCall, gradients: Sequence[Any], request: Callable[[], PlanRequest]
    ) -> KnownCall:
        """The call that takes these gradients back; ``request()`` says what it moves."""
        form = self.form(list(gradients), None, None, None, ())
        known = None if form is None else forward.backwards.get(form.key)
        if known is None:
            known = KnownCall.of(plans, request())
            if form is not None:
                forward.backwards.put(form.key, known)
        return known
