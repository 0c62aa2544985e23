"""Stages of a model on the meta device made real: memory for their tensors, and initial values, the user's or the
modules' own."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_xmesh.pipeline.state.gradient_sync import local_of, plain_name
from torch_xmesh.pipeline.state.seeds import dropout_rng, dropout_seed

InitFn = Callable[[nn.Module], object]


def materialize(
    modules: Mapping[int, nn.Module],
    init_fn: InitFn | None,
    *,
    devices: Mapping[int, torch.device],
    seed: int,
    rank: int,
) -> dict[str, torch.Tensor]:
    """Gives every parameter and buffer on meta memory on its stage's device, in place; then calls `init_fn`, or else
    ``reset_parameters`` where there is one, for each module that directly holds such a tensor.

    Random numbers come from a seed per module: ranks that hold the same tensors draw the same numbers, ranks that hold
    shards of them their own.

    Args:
        modules: by stage, this rank's. A parameter that has several names stays one.
        devices: by stage.

    Returns:
        what still has no value, by name: tensors whose elements nobody has set.

    Raises:
        ValueError: nobody has set a buffer that no state dict will have.
    """
    found = [(stage, enumerate(_holders(module))) for stage, module in modules.items()]
    holders = [(stage, number, path, holder) for stage, several in found for number, (path, holder) in several]
    if not holders:
        return {}
    _watch_optimizers()
    ties: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in modules.values():
        for submodule in module.modules():
            for key, parameter in submodule._parameters.items():
                if parameter is not None and parameter.is_meta:
                    setattr(parameter, _REPLACED, True)
                    ties.setdefault(id(parameter), []).append((submodule, key))
    with torch.no_grad():
        for stage, module in modules.items():
            apply: Any = module._apply  # FSDP2's too, which has tensors of its own
            apply(lambda tensor, device=devices[stage]: _unset(tensor, device) if tensor.is_meta else tensor)
    for names in ties.values():
        first, key = names[0]
        for other, other_key in names[1:]:
            other._parameters[other_key] = first._parameters[key]
    left: dict[str, torch.Tensor] = {}
    for stage, number, path, holder in holders:
        marked = {key: (tensor, tensor._version) for key, tensor in _own(holder)}
        has_shards = any(isinstance(parameter, DTensor) for parameter in holder.parameters(recurse=False))
        with (
            dropout_rng(
                dropout_seed(seed=seed, step=-1, stage=stage, microbatch=number, data_shard=rank if has_shards else -1),
                devices[stage],
            ),
            torch.no_grad(),
        ):
            if init_fn is not None:
                init_fn(holder)
            elif callable(reset := getattr(holder, "reset_parameters", None)):
                reset()
        for key, tensor in _own(holder):
            if is_unset(tensor) and not (
                _mark_is_value(tensor.dtype) and _is_written(tensor, *marked.get(key, (None, 0)))
            ):
                name = f"{plain_name(f'{path}.{key}' if path else key)} of stage {stage}"
                _check_kept(holder, key, name)
                left.setdefault(name, tensor)
    return left


_REPLACED = "_xmesh_replaced"


@functools.cache
def _watch_optimizers() -> None:
    """From now on a step of an optimizer that holds parameters which an engine has replaced is an error: their
    gradients stay None, so nothing would be trained and nothing would say so."""

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.is_meta and getattr(parameter, _REPLACED, False):
                    raise ValueError(
                        "the optimizer was made before the engine, with parameters on the meta device that the engine "
                        "has made real: make it with engine.parameters()"
                    )

    register_optimizer_step_pre_hook(check)


def _holders(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, submodule in module.named_modules():
        if any(tensor.is_meta for _, tensor in _own(submodule)):
            yield path, submodule


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield key, tensor


def _unset(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory that shows whether somebody sets it."""
    made = torch.empty_like(tensor, device=device)
    local_of(made).fill_(_mark(tensor.dtype))
    return made


def _mark(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def is_unset(tensor: torch.Tensor) -> bool:
    """Whether any element is as `_unset` left it; of bool and unsigned tensors, whose marks are values too, all."""
    local = local_of(tensor.detach())
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(local.isnan().any())
    marks = local == _mark(tensor.dtype)
    return local.numel() > 0 and bool(marks.all() if _mark_is_value(tensor.dtype) else marks.any())


def _mark_is_value(dtype: torch.dtype) -> bool:
    """Whether all elements may rightly be as `_unset` makes them: a mask that is False throughout."""
    return dtype == torch.bool or not dtype.is_signed


def _is_written(tensor: torch.Tensor, before: torch.Tensor | None, version: int) -> bool:
    return tensor is not before or tensor._version != version


def _check_kept(module: nn.Module, key: str, name: str) -> None:
    if key in module._non_persistent_buffers_set:
        raise ValueError(
            f"buffer {name} is on the meta device, no state dict will have it, and nobody has computed it: compute it "
            f"in init_fn(module) ({type(module).__name__}) or in parallelize"
        )
