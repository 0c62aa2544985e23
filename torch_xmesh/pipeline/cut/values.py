"""A partition: stages, the tensors between them, the model's inputs and outputs."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.capture.regions import Autocasts, autocasts
from torch_xmesh.pipeline.cut.argument_mistakes import describe_mismatch
from torch_xmesh.pipeline.cut.stage_module import ModuleElsewhere
from torch_xmesh.pipeline.cut.stage_program import StageProgram
from torch_xmesh.pipeline.cut.units import Units
from torch_xmesh.pipeline.cut.value_info import ValueInfo
from torch_xmesh.pipeline.cut.ways import Ways

MOST_SIZES = 64
"""For how many different sizes of the inputs something is kept, such as the stages made for them."""


@dataclasses.dataclass(frozen=True)
class InputInfo:
    """A tensor argument of the model: ``path`` is ("args", 0, ...) or ("kwargs", "name", ...)."""

    name: str
    path: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None
    stages: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ValueName:
    """The place of a value in the output's structure."""

    name: str


@dataclasses.dataclass(frozen=True)
class OutputStructure:
    """The model's output: a pytree whose leaves are values (`names`, without repeats) and constants."""

    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(leaf.name for leaf in self.leaves if isinstance(leaf, ValueName)))

    @functools.cached_property
    def is_single(self) -> bool:
        """Whether the output is one value and nothing around it."""
        return self.structure.is_leaf() and isinstance(self.leaves[0], ValueName)

    def unflatten(self, values: Mapping[str, torch.Tensor]) -> Any:
        """The model's output, of the output values by name."""
        flat = [values[leaf.name] if isinstance(leaf, ValueName) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(flat, self.structure)


@dataclasses.dataclass(frozen=True)
class SizedStages:
    """What of a partition follows from the sizes of the model's inputs, as `Partition` and `StageProgram` have it."""

    values: dict[str, ValueInfo]
    outputs: OutputStructure
    fixed_batch: bool
    programs: list[StageProgram]


Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the model's tensor arguments, by value name, with the example's number of samples."""


@dataclasses.dataclass
class Partition:
    """A model as stages.

    Attributes:
        stages: what each stage runs.
        values: the tensors that enter the model, cross stages or leave it; inputs first, then by producer and order
            of execution.
        inputs: the tensor arguments of the model, by value name.
        outputs: the model's output over values.
        tied_parameters: groups of (stage, name) of one parameter object that several stages hold.
        unused_parameters: the model's parameters that no stage holds.
        batch_size: samples of the example arguments, None if no argument has a batch dim.
        fixed_batch: the stages work for `batch_size` samples only.
        resize: finds the stages for inputs of other sizes, and under the autocast that is on; those inputs that are at
            hand show which values are usual. ValueError where the stages do not hold for them.
        autocasts: under which all this was found.
        opened: the modules of a recorded model that were looked into.
        changed_parameters: by name, the first stage whose forward writes to one.
        ways: what the recordings of a recorded model compute.
    """

    stages: list[StageProgram]
    values: dict[str, ValueInfo]
    inputs: dict[str, InputInfo]
    outputs: OutputStructure
    tied_parameters: list[list[tuple[int, str]]]
    unused_parameters: tuple[str, ...]
    batch_size: int | None
    fixed_batch: bool
    argument_leaves: tuple[Any, ...]
    argument_structure: pytree.TreeSpec
    resize: Callable[[Shapes, Mapping[str, torch.Tensor]], SizedStages] | None = dataclasses.field(
        default=None, repr=False
    )
    autocasts: Autocasts = dataclasses.field(default_factory=autocasts)
    opened: frozenset[str] = frozenset()
    changed_parameters: Mapping[str, int] = dataclasses.field(default_factory=dict, repr=False)
    ways: Ways = dataclasses.field(default_factory=Ways, repr=False)
    _sized: dict[Any, "Partition"] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @functools.cached_property
    def units(self) -> Units:
        """What places run: stages, or their segments."""
        return Units([stage.num_segments for stage in self.stages])

    def inputs_of_units(
        self, stages: Sequence[int], inputs: Mapping[int, Sequence[Sequence[torch.Tensor]]]
    ) -> dict[int, list[list[torch.Tensor]]]:
        """By unit of some stages and microbatch those of the model's inputs that it takes; `inputs`: by stage."""
        out: dict[int, list[list[torch.Tensor]]] = {}
        for unit, stage, place in self.units.of_stages(stages):
            segments = self.stages[stage].segments
            for given in inputs.get(stage, ()):
                positions = range(len(given)) if segments is None else segments.segments[place].model_inputs
                out.setdefault(unit, []).append([given[position] for position in positions])
        return out

    @property
    def training(self) -> bool | None:
        """The mode of the recorded stages whose modules are here; None while that is several."""
        return next(stage.inner.mode for stage in self.stages if stage.inner is not None)

    def keep(self, stages: Collection[int]) -> None:
        """Lets go of the modules of all stages but these."""
        for program in self.stages:
            if program.index not in stages:
                program.module, program.inner = ModuleElsewhere(program.module), None

    def shapes_of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], stages: Collection[int] | None = None
    ) -> dict[str, tuple[int, ...]]:
        """What :meth:`at` is given for arguments, or for those that some stages read: their shapes, the batch dim as in
        the example; the example's of several as large as that, where the stages work for its number of samples only.

        Raises:
            ValueError: another structure, dtype or number of dims than the example's.
        """
        leaves, structure = pytree.tree_flatten(sorted_arguments(args, kwargs))
        self._check_structure(structure)
        wanted = {name for stage in stages or range(self.num_stages) for name in self.stages[stage].model_inputs}
        shapes = {}
        for leaf, expected in zip(leaves, self.argument_leaves, strict=True):
            if isinstance(expected, ValueName) and (stages is None or expected.name in wanted):
                info = self.inputs[expected.name]
                self._check_kind(info, leaf)
                shapes[info.name] = tuple(
                    info.shape[dim] if dim == info.batch_dim else size for dim, size in enumerate(leaf.shape)
                )
                if self.fixed_batch and _is_several(shapes[info.name], info.shape):
                    shapes[info.name] = info.shape
        return shapes

    def at(self, shapes: Shapes, usual: Mapping[str, torch.Tensor] | None = None) -> "Partition":
        """The same stages, with the same modules, for inputs of these shapes; the last ones found are kept.

        Raises:
            ValueError: the stages do not work for them, or only for the example's.
        """
        key = tuple(shapes[name] for name in self.inputs), autocasts()
        found = self._sized.pop(key, None) or self.resized(shapes, usual or {})
        if found is not self:
            self._sized[key] = found
        if len(self._sized) > MOST_SIZES:
            del self._sized[next(iter(self._sized))]
        return found

    def resized(self, shapes: Shapes, usual: Mapping[str, torch.Tensor]) -> "Partition":
        """As :meth:`at`, found anew. With ready stages that are elsewhere, all processes call it alike."""
        changed = next((info for info in self.inputs.values() if shapes[info.name] != info.shape), None)
        is_cast = autocasts() != self.autocasts
        if (changed is None and not is_cast) or self.resize is None:
            return self
        try:
            found = self.resize(shapes, usual)
            _check_alike(self.values, found.values, is_cast)
            if found.fixed_batch != self.fixed_batch:
                raise ValueError(f"they would work for {self.batch_size} samples only")
        except ValueError as error:
            what = "torch.autocast is not as it was when the stages were made"
            if changed is not None:
                shape = shapes[changed.name]
                what = f"argument {describe_path(changed.path)} has shape {shape}, the example had {changed.shape}"
            raise ValueError(f"{what}, and the stages do not work for it: {error}") from error
        stages = [
            dataclasses.replace(
                stage, codes=other.codes, infos=other.infos, adapter=other.adapter, segments=other.segments
            )
            for stage, other in zip(self.stages, found.programs, strict=True)
        ]
        inputs = {name: dataclasses.replace(info, shape=found.values[name].shape) for name, info in self.inputs.items()}
        return dataclasses.replace(
            self,
            stages=stages,
            values=found.values,
            inputs=inputs,
            outputs=found.outputs,
            fixed_batch=found.fixed_batch,
            autocasts=autocasts(),
            _sized={},
        )

    def bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, stage: int | None = None
    ) -> dict[str, torch.Tensor]:
        """The model's input values in one microbatch's arguments: all of them, or those that `stage` takes.

        Raises:
            ValueError: another structure, dtype or size (the batch dim apart) than the example's, or another
                constant.
        """
        return self.bind_leaves(*pytree.tree_flatten(sorted_arguments(args, kwargs)), stage)

    def bind_leaves(
        self, leaves: Sequence[Any], structure: pytree.TreeSpec, stage: int | None = None, any_size: bool = False
    ) -> dict[str, torch.Tensor]:
        """The same of :func:`sorted_arguments` as leaves and their structure; `any_size`: sizes are not compared, but
        for the number of samples where that is fixed."""
        self._check_structure(structure)
        wanted = set(self.inputs if stage is None else self.stages[stage].model_inputs)
        bound = {}
        for leaf, expected in zip(leaves, self.argument_leaves, strict=True):
            if not isinstance(expected, ValueName):
                _check_constant(leaf, expected[0], expected[1])
            elif expected.name in wanted:
                self._check_input(self.inputs[expected.name], leaf, any_size)
                bound[expected.name] = leaf
        return bound

    def _check_structure(self, structure: pytree.TreeSpec) -> None:
        if structure != self.argument_structure:
            raise ValueError(describe_mismatch(structure, self.argument_structure))

    def _check_kind(self, info: InputInfo, tensor: Any) -> None:
        where = f"argument {describe_path(info.path)}"
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{where} must be a tensor of shape {info.shape} as in the example arguments, got "
                f"{type(tensor).__name__}"
            )
        if tensor.dtype != info.dtype:
            raise ValueError(f"{where} has dtype {tensor.dtype}, the example had {info.dtype}")
        if tensor.dim() != len(info.shape):
            raise ValueError(f"{where} has shape {tuple(tensor.shape)}, the example had {info.shape}")

    def _check_input(self, info: InputInfo, tensor: Any, any_size: bool = False) -> None:
        self._check_kind(info, tensor)
        free = None if self.fixed_batch else info.batch_dim
        compared = [dim for dim in range(tensor.dim()) if dim != free and (dim == info.batch_dim or not any_size)]
        if any(tensor.size(dim) != info.shape[dim] for dim in compared):
            raise ValueError(
                f"argument {describe_path(info.path)} has shape {tuple(tensor.shape)}, the example had {info.shape}"
                + (f" (dim {free}, the batch, may differ)" if free is not None else "")
            )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output by running the stages one after another in this process, on one autograd graph."""
        sized = self.for_arguments(args, kwargs)
        values = sized.bind(args, kwargs)
        for stage in sized.stages:
            results = stage(*[values[name] for name in stage.input_values])
            values.update(zip(stage.output_values, results, strict=True))
        return sized.outputs.unflatten(values)

    def for_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> "Partition":
        """The partition :meth:`at` the sizes of these arguments."""
        shapes = self.shapes_of(args, kwargs or {})
        return self.at(shapes, self.named_tensors(pytree.tree_leaves(sorted_arguments(args, kwargs))))

    def named_tensors(self, leaves: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The tensors among the leaves of :func:`sorted_arguments`, by the names of the model's inputs."""
        pairs = zip(self.argument_leaves, leaves, strict=True)
        return {expected.name: leaf for expected, leaf in pairs if isinstance(expected, ValueName)}

    def __str__(self) -> str:
        lines = []
        for stage in self.stages:
            count = sum(parameter.numel() for parameter in stage.module.parameters())
            lines.append(
                f"stage {stage.index}: {count} parameters; {', '.join(stage.input_values)} -> "
                f"{', '.join(stage.output_values)}"
            )
        for value in self.values.values():
            source = "input" if value.producer is None else f"stage {value.producer}"
            readers = ", ".join(str(stage) for stage in value.consumers) + (
                " and the output" if value.is_output else ""
            )
            grad = ", differentiable" if value.is_differentiable else ""
            lines.append(
                f"{value.name}: {source} -> {readers or 'nobody'}; {value.dtype} {list(value.shape)}, batch dim "
                f"{value.batch_dim}{grad}"
            )
        return "\n".join(lines)


def _is_several(shape: tuple[int, ...], unit: tuple[int, ...]) -> bool:
    """Whether a shape is that of several along one dim."""
    longer = [dim for dim, size in enumerate(shape) if size != unit[dim]]
    return len(longer) == 1 and unit[longer[0]] > 0 and shape[longer[0]] % unit[longer[0]] == 0


def _check_alike(values: Mapping[str, ValueInfo], others: Mapping[str, ValueInfo], is_cast: bool) -> None:
    """Raises ValueError where values differ in more than their sizes and, if `is_cast`, dtypes."""
    for name, value in values.items():
        other = others.get(name)
        kinds = [
            v and (v.producer, v.consumers, is_cast or v.dtype, v.requires_grad, v.batch_dim, v.varies)
            for v in (value, other)
        ]
        if len(values) != len(others) or kinds[0] != kinds[1]:
            raise ValueError(
                f"value {name} would have another dtype or batch dim, or cross other stages: (producer, consumers, "
                f"dtype, requires_grad, batch_dim, varies) {kinds[1]}, expected {kinds[0]}"
            )


def sorted_arguments(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments in the form that a partition compares: keyword arguments by name."""
    return tuple(args), dict(sorted((kwargs or {}).items()))


def describe_path(path: tuple[Any, ...]) -> str:
    """``("kwargs", "mask", 0)`` as ``kwargs['mask'][0]``."""
    return str(path[0]) + "".join(f"[{part!r}]" for part in path[1:])


def _check_constant(found: Any, expected: Any, where: str) -> None:
    if isinstance(found, torch.Tensor) or type(found) is not type(expected) or found != expected:
        shown = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
        raise ValueError(
            f"argument {where} is a constant of the captured model: the example had {expected!r}, got {shown}; pass "
            "it as a tensor or partition again"
        )
