"""What every node of a captured model is: shapes, dtypes and gradients at several batch sizes, found without running a
kernel.

The graph runs on fake tensors with the example's batch size n, n + 1 and n + 2; a dim that grows by the same step is
``per_sample * samples + fixed``. A module whose result depends on data runs on zeros instead.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torch_xmesh.pipeline.cut.capture import Captured, enter_modes
from torch_xmesh.pipeline.cut.chunk_specs import Chunk
from torch_xmesh.pipeline.cut.sandbox import Sandbox


@dataclasses.dataclass(frozen=True)
class Affine:
    """An integer ``per_sample * samples + fixed``."""

    per_sample: int
    fixed: int

    def at(self, samples: int) -> int:
        return self.per_sample * samples + self.fixed


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor at any number of samples."""

    sizes: tuple[Affine, ...]
    dtype: torch.dtype
    requires_grad: bool

    def shape(self, samples: int) -> tuple[int, ...]:
        return tuple(size.at(samples) for size in self.sizes)

    @property
    def batch_dim(self) -> int | None:
        """The one dim that grows with the samples and has nothing else in it, or None."""
        growing = [dim for dim, size in enumerate(self.sizes) if size.per_sample]
        return growing[0] if len(growing) == 1 and self.sizes[growing[0]].fixed == 0 else None


@dataclasses.dataclass(frozen=True)
class Constant:
    """A value that is no tensor and the same for every batch size."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Opaque:
    """A value that is no tensor, no integer, and depends on the batch size."""


Leaf = TensorInfo | Constant | Affine | Opaque


@dataclasses.dataclass(frozen=True)
class NodeInfo:
    """A node's value: the leaves of a pytree."""

    leaves: tuple[Leaf, ...]
    structure: pytree.TreeSpec

    @property
    def is_leaf(self) -> bool:
        return self.structure.is_leaf()

    @property
    def has_tensors(self) -> bool:
        return any(isinstance(leaf, TensorInfo) for leaf in self.leaves)


@dataclasses.dataclass
class Propagation:
    """The result of `propagate`.

    Attributes:
        info: by node.
        changed_in: stages that change a node's tensor in place after the node made it.
        changed_buffers: stages that change a buffer of the model, by its name.
        fixed_batch: the graph ran with the example's batch size only.
        aliases: storage key of a node's tensors, to find nodes that share memory.
    """

    info: dict[fx.Node, NodeInfo]
    changed_in: dict[fx.Node, set[int]]
    changed_buffers: dict[str, set[int]]
    fixed_batch: bool
    aliases: dict[fx.Node, set[int]]


def propagate(
    model: nn.Module,
    captured: Captured,
    examples: Sequence[torch.Tensor],
    *,
    specs: Sequence[Any],
    stage_of: Callable[[fx.Node], int],
    device: torch.device,
) -> Propagation:
    """Run the graph on fakes of `examples` (one per placeholder, to be cut by `specs`); what is on meta counts as on
    `device`.

    Raises:
        ValueError: a node fails; the message has the node, its stage, its line and the reason.
    """
    samples = {
        example.size(spec.split_dim) for example, spec in zip(examples, specs, strict=True) if isinstance(spec, Chunk)
    }
    first = _Run(model, captured, stage_of, device)
    first.run_all(examples, specs, 0)
    runs = [first.values]
    fixed = captured.fixed_batch or not samples
    if not fixed:
        try:
            for extra in (1, 2):
                more = _Run(model, captured, stage_of, device)
                more.run_all(examples, specs, extra)
                runs.append(more.values)
        except ValueError:
            fixed = True
    count = next(iter(samples), 0)
    if not fixed:
        try:
            info = {node: join([run[node] for run in runs], count) for node in first.values}
        except NotLinearError:
            fixed = True
    if fixed:
        info = {node: join([value], count) for node, value in first.values.items()}
    return Propagation(
        info, first.changed_in, first.changed_buffers, captured.fixed_batch or (fixed and bool(samples)), first.aliases
    )


def training_effects(
    model: nn.Module,
    captured: Captured,
    examples: Sequence[torch.Tensor],
    *,
    specs: Sequence[Any],
    stage_of: Callable[[fx.Node], int],
    device: torch.device,
) -> tuple[set[int] | None, dict[str, set[int]]]:
    """In training mode: the stages that draw random numbers (None: unknown), and `changed_buffers`."""
    flags = {module: module.training for module in model.modules()}
    watch = RandomWatch()
    run = _Run(model, captured, stage_of, device, watch)
    try:
        for module in flags:
            module.training = True
        run.run_all(examples, specs, 0)
    except ValueError:
        return None, run.changed_buffers
    finally:
        for module, flag in flags.items():
            module.training = flag
    return watch.stages, run.changed_buffers


class RandomWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes in which stage an operator draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stage = 0
        self.stages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.stages.add(self.stage)
        return func(*args, **(kwargs or {}))


class _Run:
    """One run of the graph at one batch size."""

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        stage_of: Callable[[fx.Node], int],
        device: torch.device,
        watch: "RandomWatch | None" = None,
    ) -> None:
        self._sandbox = Sandbox(model, device)
        self._model, self._traced, self._stage_of, self._watch = model, captured, stage_of, watch
        self.values: dict[fx.Node, tuple[list[Any], pytree.TreeSpec]] = {}
        self.changed_in: dict[fx.Node, set[int]] = {}
        self.aliases: dict[fx.Node, set[int]] = {}
        self.changed_buffers: dict[str, set[int]] = {}
        self._tensors: dict[fx.Node, list[tuple[torch.Tensor, int]]] = {}
        self._buffers: dict[str, tuple[torch.Tensor, int]] = {}

    def run_all(self, examples: Sequence[torch.Tensor], specs: Sequence[Any], extra: int) -> None:
        with self._sandbox:
            inputs = iter(
                [
                    self._sandbox.fake(_grown(example, spec, extra))
                    for example, spec in zip(examples, specs, strict=True)
                ]
            )
            self._buffers = {name: (buffer, buffer._version) for name, buffer in self._model.named_buffers()}
            environment: dict[fx.Node, Any] = {}
            stage = 0
            for node in self._traced.graph.nodes:
                here = self._stage_of(node) if node.op not in ("placeholder", "get_attr") else stage
                if here != stage:
                    self._note_changes(stage)
                    stage = here
                environment[node] = next(inputs) if node.op == "placeholder" else self._run_node(node, environment)
                self._record(node, environment[node])
            self._note_changes(stage)

    def _run_node(self, node: fx.Node, environment: dict[fx.Node, Any]) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: environment[n])
        modes = node.meta["modes"]
        if self._watch is not None:
            self._watch.stage = self._stage_of(node)
        try:
            with enter_modes(*modes) if modes else contextlib.nullcontext(), self._watch or contextlib.nullcontext():
                if node.op == "get_attr":
                    return self._attribute(node.target)
                if node.op == "call_module":
                    return self._sandbox.call(self._model.get_submodule(str(node.target)), args, kwargs)
                if node.op == "call_method":
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"stage {self._stage_of(node)}, node {node.name} ({node.op} "
                f"{node.target}){' at ' + node.meta['source'] if node.meta['source'] else ''}: "
                f"its result cannot be found from the example arguments: {type(error).__name__}: {reason}"
            ) from error

    def _attribute(self, target: Any) -> Any:
        found: Any = self._traced.constants.get(target)
        if isinstance(found, torch.Tensor):
            return self._sandbox.fake(found)
        if found is None:
            found = self._model
            for atom in str(target).split("."):
                found = getattr(found, atom)
        return found

    def _record(self, node: fx.Node, value: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        self._tensors[node] = [(tensor, tensor._version) for tensor in tensors]
        self.aliases[node] = {tensor.untyped_storage()._cdata for tensor in tensors}
        self.values[node] = describe(value)

    def _note_changes(self, stage: int) -> None:
        for node, tensors in self._tensors.items():
            for index, (tensor, version) in enumerate(tensors):
                if tensor._version != version:
                    self.changed_in.setdefault(node, set()).add(stage)
                    tensors[index] = (tensor, tensor._version)
        for name, (buffer, version) in self._buffers.items():
            if buffer._version != version:
                self.changed_buffers.setdefault(name, set()).add(stage)
                self._buffers[name] = (buffer, buffer._version)


def _grown(example: torch.Tensor, spec: Any, extra: int) -> torch.Tensor:
    if not extra or not isinstance(spec, Chunk):
        return example
    shape = list(example.shape)
    shape[spec.split_dim] += extra
    return torch.empty(shape, dtype=example.dtype, device="meta" if example.is_meta else example.device).requires_grad_(
        example.requires_grad
    )


class NotLinearError(Exception):
    """A size is no linear function of the number of samples."""


def describe(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """A value's leaves, tensors as (shape, dtype, requires_grad), and its structure: what `join` takes."""
    leaves, structure = pytree.tree_flatten(value)
    return [
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ], structure


def join(runs: list[tuple[list[Any], pytree.TreeSpec]], samples: int) -> NodeInfo:
    """What is common to descriptions made with `samples`, `samples` + 1 and `samples` + 2 samples (or with `samples`
    only).

    Raises:
        NotLinearError: a size is no linear function of the number of samples, or the structures differ.
    """
    if any(structure != runs[0][1] for _, structure in runs):
        raise NotLinearError
    return NodeInfo(
        tuple(_join_leaf(list(leaf), samples) for leaf in zip(*(flat for flat, _ in runs), strict=True)), runs[0][1]
    )


def _join_leaf(seen: list[Any], samples: int) -> Leaf:
    if isinstance(seen[0], tuple) and len(seen[0]) == 3 and isinstance(seen[0][1], torch.dtype):
        shapes = [shape for shape, _, _ in seen]
        if any(len(shape) != len(shapes[0]) for shape in shapes):
            raise NotLinearError
        return TensorInfo(tuple(_line(list(dim), samples) for dim in zip(*shapes, strict=True)), seen[0][1], seen[0][2])
    if all(type(value) is type(seen[0]) and bool(value == seen[0]) for value in seen):
        return Constant(seen[0])
    if all(type(value) is int for value in seen):
        return _line(seen, samples)
    return Opaque()


def _line(values: list[int], samples: int) -> Affine:
    if len(values) == 1:
        return Affine(0, values[0])
    step = values[1] - values[0]
    if values[2] - values[1] != step:
        raise NotLinearError
    return Affine(step, values[0] - step * samples)
