"""A partition out of ready stage modules: a chain in which each stage gets what the one before returns."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.capture.sandbox import Sandbox, meta_copy
from torch_xmesh.pipeline.capture.watch import OperatorWatch
from torch_xmesh.pipeline.cut.chunk_specs import Chunk
from torch_xmesh.pipeline.cut.infos import (
    Affine,
    Constant,
    Leaf,
    NotLinearError,
    TensorInfo,
    describe,
    join,
)
from torch_xmesh.pipeline.cut.ready_adapter import ReadyAdapter
from torch_xmesh.pipeline.cut.stage_program import StageProgram
from torch_xmesh.pipeline.cut.value_info import ValueInfo
from torch_xmesh.pipeline.cut.values import OutputStructure, SizedStages, ValueName


@dataclasses.dataclass(frozen=True)
class StageSignature:
    """What a ready stage returns, as the process that holds it found out; can be pickled."""

    leaves: tuple[Leaf, ...]
    structure: str
    fixed_batch: bool
    uses_rng: bool
    changed: frozenset[int]

    @property
    def tensor_positions(self) -> tuple[int, ...]:
        return tuple(position for position, leaf in enumerate(self.leaves) if isinstance(leaf, TensorInfo))


Exchange = Callable[[int, StageSignature | ValueError | None], StageSignature]
"""Called for each stage in order, on every process, with the stage's signature where the process holds it (or why that
cannot be found), else None.

Returns what the holder passed, or raises ValueError on every process.
"""


def chain_ready_stages(
    modules: Sequence[nn.Module | None],
    arguments: Any,
    specs: Sequence[Any],
    *,
    samples: int | None,
    names: Sequence[str],
    exchange: Exchange | None,
    device: torch.device,
) -> SizedStages:
    """Programs of all stages (an empty module where `modules` has None), the values between them, and the output.

    Raises:
        ValueError: a stage's result cannot be found, or a module is missing without `exchange`.
    """
    missing = [stage for stage, module in enumerate(modules) if module is None]
    if missing and exchange is None:
        raise ValueError(
            f"stages {missing} are None: their modules are elsewhere, so `exchange` must tell what they return"
        )
    last = len(modules) - 1
    tree: Any = _input_tree(arguments, specs, samples or 0)
    given = list(names)
    values: dict[str, ValueInfo] = {}
    _add_values(values, given, pytree.tree_leaves(tree), producer=None, consumers=(0,), samples=samples, output=False)
    programs = []
    fixed = False
    for stage, module in enumerate(modules):
        signature: StageSignature | None = None
        failure: ValueError | None = None
        try:
            if module is not None:
                signature = stage_signature(stage, module, tree, samples=samples, fixed=fixed, device=device)
        except ValueError as error:
            if exchange is None:
                raise
            failure = error
        if exchange is not None:
            signature = exchange(stage, failure or signature)
        assert signature is not None
        fixed = fixed or signature.fixed_batch
        made = [f"stage{stage}.{position}" for position in signature.tensor_positions]
        structure = pytree.treespec_loads(signature.structure)
        adapter = ReadyAdapter(*_positions(tree), structure, signature.tensor_positions, signature.changed)
        program = StageProgram(
            stage,
            module if module is not None else nn.Module(),
            tuple(given),
            tuple(made),
            (),
            signature.uses_rng,
            adapter,
        )
        program.model_inputs = tuple(given) if stage == 0 else ()
        programs.append(program)
        _add_values(
            values,
            made,
            signature.leaves,
            producer=stage,
            consumers=() if stage == last else (stage + 1,),
            samples=samples,
            output=stage == last,
        )
        result = pytree.tree_unflatten(list(signature.leaves), structure)
        tree = (tuple(result) if type(result) in (tuple, list) else (result,), {})
        given = made
    assert signature is not None
    flat = iter(given)
    output = tuple(
        ValueName(next(flat)) if isinstance(leaf, TensorInfo) else leaf.value
        for leaf in signature.leaves
        if isinstance(leaf, TensorInfo | Constant)
    )
    if fixed:
        values = {name: dataclasses.replace(info, fixed_batch=True) for name, info in values.items()}
    return SizedStages(values, OutputStructure(output, structure), fixed, programs)


class MetaCopies:
    """Copies on meta of modules, taken when this is made."""

    def __init__(self, modules: Sequence[nn.Module | None], *, keep_forward_hooks: bool = False) -> None:
        self._modules: list[nn.Module | None] = []
        self._error: ValueError | None = None
        try:
            self._modules = [
                None if module is None else meta_copy(module, keeps_forward_hooks=keep_forward_hooks)
                for module in modules
            ]
        except ValueError as error:
            self._error = error

    def modules(self) -> list[nn.Module | None]:
        """Raises ValueError where they could not be copied."""
        if self._error is not None:
            raise self._error
        return self._modules


def stage_signature(
    stage: int, module: nn.Module, tree: Any, *, samples: int | None, fixed: bool, device: torch.device
) -> StageSignature:
    """Find out what a stage returns for inputs described by `tree` (TensorInfo and Constant leaves), on fakes.

    Raises:
        ValueError: it fails, or returns something that is no tensor and depends on the batch size.
    """
    count = samples or 0
    watch = OperatorWatch()
    first, changed = _run(stage, module, tree, samples=count, device=device)
    runs, fixed = [first], fixed or samples is None
    if not fixed:
        try:
            runs += [_run(stage, module, tree, samples=count + extra, device=device)[0] for extra in (1, 2)]
            info = join(runs, count)
        except (ValueError, NotLinearError):
            fixed = True
    if fixed:
        info = join([first], count)
    for leaf in info.leaves:
        if not isinstance(leaf, TensorInfo | Constant):
            raise ValueError(
                f"stage {stage} ({type(module).__name__}) returns a value that is no tensor and depends on the "
                "batch size: return a tensor"
            )
    flags = {child: child.training for child in module.modules()}
    try:
        for child in flags:
            child.training = True
        _run(stage, module, tree, samples=count, device=device, watch=watch)
        random = watch.is_random
    except ValueError:
        random = True
    finally:
        for child, flag in flags.items():
            child.training = flag
    return StageSignature(
        info.leaves, pytree.treespec_dumps(info.structure), fixed and samples is not None, random, changed
    )


def _run(
    stage: int, module: nn.Module, tree: Any, *, samples: int, device: torch.device, watch: OperatorWatch | None = None
) -> tuple[Any, frozenset[int]]:
    tensors_of_stage = (*module.parameters(), *module.buffers())
    device = next((tensor.device for tensor in tensors_of_stage if not tensor.is_meta), device)
    with Sandbox(module, device) as sandbox:

        def fake(leaf: Leaf) -> Any:
            if not isinstance(leaf, TensorInfo):
                return leaf.value if isinstance(leaf, Constant) else leaf
            made = torch.empty(leaf.shape(samples), dtype=leaf.dtype, device=device)
            return made.requires_grad_().clone() if leaf.requires_grad else made

        args, kwargs = pytree.tree_map(fake, tree)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        versions = [tensor._version for tensor in tensors]
        try:
            if watch is None:
                result = sandbox.call(module, args, kwargs)
            else:
                with watch:
                    result = sandbox.call(module, args, kwargs)
        except Exception as error:
            shown = pytree.tree_map(
                lambda leaf: list(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
            )
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"stage {stage} ({type(module).__name__}) fails on its example inputs {shown}: "
                f"{type(error).__name__}: {reason}"
            ) from error
        changed = (
            index
            for index, (tensor, version) in enumerate(zip(tensors, versions, strict=True))
            if tensor._version != version
        )
        return describe(result), frozenset(changed)


def _input_tree(arguments: Any, specs: Sequence[Any], samples: int) -> Any:
    leaves, structure = pytree.tree_flatten(arguments)
    described: list[Leaf] = []
    for leaf, spec in zip(leaves, specs, strict=True):
        if not isinstance(leaf, torch.Tensor):
            described.append(Constant(leaf))
            continue
        sizes = [Affine(0, size) for size in leaf.shape]
        if isinstance(spec, Chunk):
            sizes[spec.split_dim] = Affine(leaf.shape[spec.split_dim] // samples, 0)
        described.append(TensorInfo(tuple(sizes), leaf.dtype, leaf.requires_grad))
    return pytree.tree_unflatten(described, structure)


def _positions(tree: Any) -> tuple[tuple[Any, ...], pytree.TreeSpec]:
    leaves, structure = pytree.tree_flatten(tree)
    count = iter(range(len(leaves)))
    return tuple(next(count) if isinstance(leaf, TensorInfo) else (leaf.value,) for leaf in leaves), structure


def _add_values(
    values: dict[str, ValueInfo],
    names: Sequence[str],
    leaves: Sequence[Any],
    *,
    producer: int | None,
    consumers: tuple[int, ...],
    samples: int | None,
    output: bool,
) -> None:
    tensors = [leaf for leaf in leaves if isinstance(leaf, TensorInfo)]
    for name, tensor in zip(names, tensors, strict=True):
        values[name] = ValueInfo(
            name,
            producer,
            consumers,
            tensor.shape(samples or 0),
            tensor.dtype,
            tensor.requires_grad,
            tensor.batch_dim,
            output,
            tensor,
            samples or 0,
            varies=producer is not None and samples is not None and tensor.batch_dim is None,
        )
