"""One interface for everything that is measured, and the product's own methods behind it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parts.resharding.cases import Case, TensorLayout
from parts.resharding.overlaps import Box, box_shape, shard_dim, tile

_PRIME = 2654435761 - (1 << 32)  # Knuth's multiplier as a signed 32-bit number
_MASK = {torch.float32: 0xFFFFFF, torch.bfloat16: 0xFF, torch.float16: 0x7FF}


class Method(ABC):
    """A way to reshard one case. Made on every rank of the cluster in the same order; only participants `run`."""

    num_messages: int = 0
    """Messages of one reshard, all ranks together."""
    predicted_seconds: float | None = None
    plan_strategy: str | None = None
    """What the method chose, where it chooses."""

    @abstractmethod
    def run(self) -> Sequence[torch.Tensor]:
        """Reshards once, to the end, and returns this rank's local destination tensors, one per tensor of the case."""

    def close(self) -> None:  # noqa: B027
        """Ends what the method keeps beside the cluster's own groups: each gloo group has a thread that wakes up 100
        times a second, in the way of what is measured after it. Every rank of the cluster calls this."""


def pattern(layout: TensorLayout, index: int, box: Box) -> torch.Tensor:
    """The contents of `box` of tensor `index`: a hash of the global flat index, exact in the tensor's dtype."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    flat = torch.zeros((), dtype=torch.int32)
    stride = 1
    strides = []
    for size in reversed(layout.shape):
        strides.append(stride)
        stride = stride * size
    for dim, (begin, end) in enumerate(box):
        steps = torch.arange(begin, end, dtype=torch.int64) * strides[len(box) - 1 - dim]
        view = [1] * len(box)
        view[dim] = end - begin
        flat = flat + (steps & 0x7FFFFFFF).to(torch.int32).view(view)
    flat = flat.contiguous()
    flat.add_(index * 7919).mul_(_PRIME).bitwise_right_shift_(7).bitwise_and_(_MASK.get(dtype, 0xFFFFFF))
    return flat.to(dtype)


@dataclass
class RankData:
    """What one rank of the cluster holds of a case: source tiles, buffers for the result, and what must be in them."""

    case: Case
    rank: int
    src_boxes: list[Box | None]
    dst_boxes: list[Box | None]
    sources: list[torch.Tensor]
    outs: list[torch.Tensor]
    expected: list[torch.Tensor]

    @staticmethod
    def make(case: Case, rank: int) -> "RankData":
        src_boxes, dst_boxes = [], []
        sources, outs, expected = [], [], []
        for index, layout in enumerate(case.tensors):
            dtype: torch.dtype = getattr(torch, layout.dtype)
            src_box = tile(layout.shape, case.src_mesh, layout.src, rank)
            dst_box = tile(layout.shape, case.dst_mesh, layout.dst, rank)
            src_boxes.append(src_box)
            dst_boxes.append(dst_box)
            empty = torch.empty(0, dtype=dtype)
            sources.append(pattern(layout, index, src_box) if src_box is not None else empty)
            outs.append(torch.empty(box_shape(dst_box), dtype=dtype) if dst_box is not None else empty)
            expected.append(pattern(layout, index, dst_box) if dst_box is not None else empty)
        return RankData(case, rank, src_boxes, dst_boxes, sources, outs, expected)

    @property
    def is_participant(self) -> bool:
        return self.rank in self.case.src_mesh or self.rank in self.case.dst_mesh

    def poison(self) -> None:
        """Fills the buffers with a value that the pattern never has."""
        for out in self.outs:
            out.fill_(-1)

    def count_wrong(self, results: Sequence[torch.Tensor]) -> int:
        """Elements that are not what they must be; a result of the wrong shape counts with all its elements."""
        wrong = 0
        for result, want in zip(results, self.expected, strict=True):
            if result.shape != want.shape and (result.numel() or want.numel()):
                wrong += max(want.numel(), result.numel(), 1)
            elif not torch.equal(result.view(want.shape), want):
                wrong += max(1, int((result != want).sum()))
        return wrong


class XmeshMethod(Method):
    """`xm.reshard` (or `xm.reshard_many` for a list) with one strategy, on `group` (None: the default one)."""

    def __init__(self, data: RankData, strategy: str, topology: Any, group: Any = None) -> None:
        """Raises ValueError where the product cannot plan this case with the strategy."""
        from torch.distributed.device_mesh import DeviceMesh

        import torch_xmesh as xm

        case = data.case
        self._xm = xm
        self._data = data
        options = {"strategy": strategy, "topology": topology}
        self._options = {**options, "group": group}
        src_mesh = DeviceMesh("cpu", torch.from_numpy(case.src_mesh), _init_backend=False)
        self._dst_mesh = DeviceMesh("cpu", torch.from_numpy(case.dst_mesh), _init_backend=False)
        self._dst_placements = [[placement(text) for text in layout.dst] for layout in case.tensors]
        specs = []
        self._inputs: list[Any] = []
        for index, layout in enumerate(case.tensors):
            placements = [placement(text) for text in layout.src]
            spec = xm.Spec(layout.shape, getattr(torch, layout.dtype), src_mesh, placements)
            specs.append(spec)
            holds = data.src_boxes[index] is not None
            self._inputs.append(_dtensor(data.sources[index], layout, src_mesh, placements) if holds else spec)
        self._out: Any = None
        if len(case.tensors) == 1:
            self._out = _dtensor(data.outs[0], case.tensors[0], self._dst_mesh, self._dst_placements[0])
        if len(specs) == 1:
            plan = xm.plan_resharding(specs[0], self._dst_mesh, self._dst_placements[0], **options)
        else:
            plan = xm.plan_resharding(specs, self._dst_mesh, self._dst_placements, **options)
        self.num_messages = int(plan.num_messages)
        self.predicted_seconds = float(plan.predicted_seconds)
        self.plan_strategy = str(plan.strategy)

    def run(self) -> Sequence[torch.Tensor]:
        if self._out is not None:
            self._xm.reshard(self._inputs[0], self._dst_mesh, self._dst_placements[0], out=self._out, **self._options)
            return self._data.outs
        results = self._xm.reshard_many(self._inputs, self._dst_mesh, self._dst_placements, **self._options)
        return [result.to_local() for result in results]


def placement(text: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    dim = shard_dim(text)
    return Replicate() if dim is None else Shard(dim)


def _dtensor(local: torch.Tensor, layout: TensorLayout, mesh: Any, placements: Sequence[Any]) -> Any:
    from torch.distributed.tensor import DTensor

    stride = torch.empty(layout.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(layout.shape), stride=stride)
