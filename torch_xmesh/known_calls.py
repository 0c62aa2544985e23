"""Calls that came before: what equal arguments were checked and planned to."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from torch_xmesh import _C
from torch_xmesh.plan_cache import PlanRequest, Plans, Prepared, RecentlyUsed
from torch_xmesh.spec import device_mesh, dtensor_spec, empty_shape, is_device_here


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
    backwards: "dict[bytes, KnownCall]" = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(plans: Plans, request: PlanRequest, **found: Any) -> "KnownCall":
        """Plans the request. ValueError for one that no plan serves."""
        prepared = plans.prepare(request)
        results = []
        for move, shape in zip(request.moves, prepared.dst_shapes, strict=True):
            dst, device = move.dst, move.dst_device
            if shape is None and not is_device_here(device):
                device = "cpu"
            local_shape = empty_shape(dst.shape) if shape is None else shape
            spec = dtensor_spec(dst.shape, dst.dtype, device_mesh(dst.mesh, move.dst_device), dst.placements)
            results.append((local_shape, dst.dtype, device, spec))
        fills_device = any(move.dst_device != "cpu" for move in request.moves)
        return KnownCall(request, prepared, _C.ResultMaker(results), request.devices(), fills_device, **found)


class KnownCalls:
    """The latest calls on one process group. One thread at a time."""

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
        self._calls.put(form.key, call)

    def backward(self, plans: Plans, forward: KnownCall, gradients: Sequence[Any], request: Any) -> KnownCall:
        """The call that takes these gradients back; ``request()`` says what it moves."""
        form = self.form(list(gradients), None, None, None, ())
        known = None if form is None else forward.backwards.get(form.key)
        if known is None:
            known = KnownCall.of(plans, request())
            if form is not None:
                forward.backwards[form.key] = known
        return known
