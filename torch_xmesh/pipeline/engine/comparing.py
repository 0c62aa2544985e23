"""What must be the same on several ranks in a step besides its facts: the values of plain batches, and whether modules
are in training mode."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.cut.values import MOST_SIZES, Shapes, ValueName, describe_path
from torch_xmesh.pipeline.ranks.digests import checksum, number_of

if TYPE_CHECKING:
    from torch_xmesh.pipeline.engine.place import EnginePlace

_FIRST_STEPS = 2

_ADVICE = (
    "a plain tensor is the whole batch, the same on every rank that passes it; where each data shard has samples of "
    "its own, call step(..., sharded=True), or pass DTensor.from_local(x, mesh, [Shard(0)])"
)


class StepComparison:
    """Numbers of one rank that others compare with theirs, by name.

    Attributes:
        texts: by name, what a person is told who has others.
    """

    def __init__(self, place: "EnginePlace", compares_batches: bool) -> None:
        self._place = place
        self._compares_batches = compares_batches
        self._num_compared = 0
        self._known: dict[Any, None] = {}  # sizes of which batches were found alike, the last ones
        self._compared: Any = None  # sizes of the batch that is being compared
        self._modules: dict[int, list[nn.Module]] = {}
        inputs = {name: info for name, info in place.partition.inputs.items() if info.stages}
        self.texts = {
            "is_training": "engine.train() (1) or engine.eval() (0): {}",
            **{f"modes {k}": f"the modules of stage {k} are in other modes (train(), eval())" for k in self._stages},
            **{
                f"values {name}": f"argument {describe_path(info.path)} has other values: {_ADVICE}"
                for name, info in inputs.items()
            },
            "values of the target": f"the target has other values: {_ADVICE}",
        }

    @property
    def _stages(self) -> range:
        return range(len(self._place.meshes))

    def modes(self) -> dict[str, int]:
        """Of this rank's stages."""
        found = {"is_training": int(self._place.own.is_training)}
        for stage, work in self._place.works.items():
            if stage not in self._modules:
                self._modules[stage] = list(work.program.module.modules())
            flags = bytes(module.training for module in self._modules[stage])
            found[f"modes {stage}"] = number_of(flags)
        return found

    def values(self, tree: Any, target: Any, takers: Sequence[int], shapes: Shapes, samples: int) -> dict[str, int]:
        """Of the plain tensors of a batch that stages `takers` read, and of a plain target; in the first steps, and in
        the first ones with other sizes."""
        key = tuple(shapes.items()), samples
        self._compared = None
        if key in self._known:
            self._known[key] = self._known.pop(key)  # used last
        if not self._compares_batches or (self._num_compared >= _FIRST_STEPS and key in self._known):
            return {}
        partition = self._place.partition
        wanted = {name for stage in takers for name in partition.stages[stage].model_inputs}
        found = {}
        for leaf, expected in zip(pytree.tree_leaves(tree) if takers else [], partition.argument_leaves, strict=False):
            if isinstance(expected, ValueName) and expected.name in wanted and _is_plain(leaf):
                found[f"values {expected.name}"] = _number_of_tensor(leaf)
        leaves = pytree.tree_leaves(target)
        if target is not None and all(_is_plain(leaf) or not isinstance(leaf, torch.Tensor) for leaf in leaves):
            numbers = [str(_number_of_tensor(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor)]
            found["values of the target"] = number_of(*numbers)
        self._compared = key if found else None
        return found

    def agreed(self) -> None:
        """All ranks have the same."""
        if self._compared is not None:
            self._num_compared += 1
            self._known[self._compared] = None
            if len(self._known) > MOST_SIZES:
                del self._known[next(iter(self._known))]


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.layout == torch.strided


def _number_of_tensor(tensor: torch.Tensor) -> int:
    return number_of(str(tensor.dtype), str(tuple(tensor.shape)), checksum(tensor))
