"""What must be the same on several ranks in a step besides its facts: the values of plain batches and of one data
shard, and whether modules are in training mode."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torch_xmesh.digests import number_of, number_of_tensor
from torch_xmesh.pipeline.capture.regions import autocasts
from torch_xmesh.pipeline.cut.values import MOST_SIZES, ValueName, describe_path
from torch_xmesh.pipeline.engine.pairing import Pairing
from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.pipeline.state.fully_sharded import USED_BY_SOME
from torch_xmesh.spec import mesh_grid

if TYPE_CHECKING:
    from torch_xmesh.pipeline.engine.place import EnginePlace
    from torch_xmesh.pipeline.engine.step_batch import StepBatch

_FIRST_STEPS = 2

_ADVICE = (
    "a plain tensor is the whole batch, the same on every rank that passes it; where each data shard has samples of "
    "its own, call step(..., sharded=True), or pass DTensor.from_local(x, mesh, [Shard(0)])"
)

_SHARED = (
    "along the mesh's other axes the batch is the same; where that is not meant, make the engine with "
    "compare_batches=False"
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
        self._pairing = Pairing(place)
        inputs = {name: info for name, info in place.partition.inputs.items() if info.stages}
        batch = {f"values {name}": f"argument {describe_path(info.path)}" for name, info in inputs.items()}
        batch["values of the target"] = "the target"
        takers: dict[str, Sequence[int]] = {f"values {name}": info.stages for name, info in inputs.items()}
        takers["values of the target"] = [len(place.meshes) - 1]
        self.texts = {
            "is_training": "engine.train() (1) or engine.eval() (0): {}",
            "autocast": "torch.autocast around the step is on, off, or of another dtype, or torch.no_grad is",
            **{f"gathered {k}": f"a module of stage {k} {USED_BY_SOME}" for k in self._stages},
            **{f"modes {k}": f"the modules of stage {k} are in other modes (train(), eval())" for k in self._stages},
            **{
                f"ways of shard {shard} of {number}": f"the model takes another way for the batch: {_ADVICE}"
                for number in sorted({mesh.num_shards for mesh in place.meshes})
                for shard in range(number)
            },
            **{name: f"{what} has other values: {_ADVICE}" for name, what in batch.items()},
            **{
                f"{name} in shard {shard}": f"{what} has other values, but both are on data shard {shard}: {_SHARED}"
                for name, what in batch.items()
                for shard in range(self._num_shared(takers[name]))
            },
        }

    def ways(self, codes: Mapping[int, Sequence[Any]]) -> dict[str, int]:
        """What ranks compare of the codes that recorded stages run for each microbatch: by data shard what the model
        read of the batch, and by stage which parameters are gathered."""
        found = {}
        for stage, several in codes.items():
            mesh = self._place.meshes[stage]
            read = (code.way if code is not None else "" for code in several)
            found[f"ways of shard {mesh.shard} of {mesh.num_shards}"] = number_of(*read)
            used = [self._place.sharded.used_by(stage, code.targets) for code in several if code is not None]
            if any(used):
                found[f"gathered {stage}"] = number_of(str(used))
        return found

    @property
    def _stages(self) -> range:
        return range(len(self._place.meshes))

    def _num_shared(self, stages: Sequence[int]) -> int:
        """Data shards of which several ranks of these stages have a copy: none, or all."""
        meshes = {self._place.meshes[stage].whole: self._place.meshes[stage] for stage in stages}
        most = max((mesh.num_shards for mesh in meshes.values()), default=0)
        return most if most > 1 and sum(len(mesh.ranks) for mesh in meshes.values()) > most else 0

    def modes(self) -> dict[str, int]:
        """What ranks compare of modes: training or evaluation, autocast and gradients on or off, and each module's mode
        in this rank's stages."""
        found = {
            "is_training": int(self._place.own.is_training),
            "autocast": number_of(str((autocasts(), torch.is_grad_enabled()))),
        }
        for stage, work in self._place.works.items():
            flags = bytes(module.training for module in work.program.module.modules())
            found[f"modes {stage}"] = number_of(flags)
        return found

    def values(self, batch: "StepBatch") -> dict[str, int]:
        """What ranks compare of the values in a batch: numbers made of the tensors that this rank's stages read, and of
        the target. Plain tensors count whole, DTensors with this rank's part. Only the first steps are compared, and
        the first ones with other sizes."""
        tree, target, takers = batch.arguments.alike, batch.target.alike, batch.takers
        leaves = pytree.tree_leaves((tree if takers else (), target))
        key = tuple(batch.shapes.items()), batch.samples, tuple(isinstance(leaf, DTensor) for leaf in leaves)
        self._compared = None
        if key in self._known:
            self._known[key] = self._known.pop(key)  # used last
        if not self._compares_batches or (self._num_compared >= _FIRST_STEPS and key in self._known):
            return {}
        partition = self._place.partition
        wanted = {name for stage in takers for name in partition.stages[stage].model_inputs}
        found: dict[str, int] = {}
        for leaf, expected in zip(pytree.tree_leaves(tree) if takers else [], partition.argument_leaves, strict=False):
            if isinstance(expected, ValueName) and expected.name in wanted:
                found |= self._number(f"values {expected.name}", [leaf], takers)
        if target is not None:
            found |= self._number("values of the target", pytree.tree_leaves(target), [len(self._place.meshes) - 1])
        self._compared = key if found else None
        return found

    def settling(self, batch: "StepBatch") -> dict[str, int]:
        """What ranks compare before they run a batch of another kind than the last ones."""
        pairs = self._pairing.numbers(batch) if self._compares_batches else {}
        return {**self.ways(batch.codes), **pairs}

    def _number(self, name: str, leaves: Sequence[Any], stages: Sequence[int]) -> dict[str, int]:
        """A number made of the values of tensors that these stages of this rank take, under a name that is the same on
        all ranks with these tensors. Empty where other ranks need not have the same values, and for layouts that are
        not strided."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        local = [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in tensors]
        if any(tensor.layout != torch.strided for tensor in local):
            return {}
        if sharded := [leaf for leaf in tensors if isinstance(leaf, DTensor)]:
            meshes = [self._place.meshes[stage] for stage in stages]
            shards = {mesh.shard for mesh in meshes if mesh.num_shards > 1}
            if len(shards) != 1 or not all(_is_by_shards(leaf, mesh) for leaf in sharded for mesh in meshes):
                return {}
            name = f"{name} in shard {shards.pop()}"
        return {name: number_of(*(str(number_of_tensor(tensor)) for tensor in local))} if name in self.texts else {}

    def agreed(self) -> None:
        """All ranks have the same."""
        if self._compared is not None:
            self._num_compared += 1
            self._known[self._compared] = None
            if len(self._known) > MOST_SIZES:
                del self._known[next(iter(self._known))]


def _is_by_shards(tensor: DTensor, mesh: StageMesh) -> bool:
    """Whether ranks of the mesh on one data shard have the same part."""
    return mesh_grid(tensor.device_mesh) == mesh.whole and all(
        axis in mesh.data_axes for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()
    )
