"""The norm of the whole model's gradients, and their clipping, as ``torch.nn.utils.clip_grad_norm_`` does it."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from torch_xmesh.pipeline.ranks.refused import StepRefusedError
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.pipeline.state.gradient_sync import local_of, settle_gradient
from torch_xmesh.pipeline.state.numbers import numbers_of
from torch_xmesh.pipeline.state.training import OwnParameter

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # a row has their place here


@dataclasses.dataclass(frozen=True)
class Clipping:
    """The arguments of ``clip_grad_norm_``, by torch's names.

    Raises:
        ValueError: no number.
    """

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool
    foreach: bool | None

    def __post_init__(self) -> None:
        for name in ("max_norm", "norm_type"):
            given = getattr(self, name)
            try:
                number = float(given)
            except (TypeError, ValueError):
                number = math.nan
            if math.isnan(number):
                raise ValueError(f"{name} is a number, got {given!r} ({type(given).__name__})")
            object.__setattr__(self, name, number)


@dataclasses.dataclass(frozen=True)
class _Row:
    """What a rank tells all others.

    Attributes:
        dtype: what this rank's counted gradients promote to, as a place in _DTYPES; -1: it has none.
        has_elements: they have any.
        part: with p = 2 the sum of their squares, so with every finite p but 0, whose parts are told apart; their
            largest or smallest absolute value with infinite ones.
    """

    max_norm: float
    norm_type: float
    error_if_nonfinite: float
    dtype: float = -1.0
    has_elements: float = 0.0
    part: float = 0.0


def clip_gradients(transfers: Transfers, parameters: Sequence[OwnParameter], clipping: Clipping) -> torch.Tensor:
    """Scales the gradients of the whole model; returns their norm before, equal everywhere, on their device.

    Raises:
        StepRefusedError: on all ranks, with all gradients as they were: ranks pass other arguments, or the norm is not
            finite where that is to be an error.
    """
    for own in parameters:
        settle_gradient(own.parameter)
    mine = {
        own.name: local_of(own.parameter.grad).detach()
        for own in parameters
        if own.is_counted and own.parameter.grad is not None
    }
    rows = _told(transfers, _row_of(list(mine.values()), clipping))
    _check_alike(transfers.ranks, rows)
    exact = _norm_of_names(transfers, mine) if clipping.norm_type == 0 else _norm_of_rows(rows, clipping.norm_type)
    norm = exact.to(_dtype_of(rows))
    if clipping.error_if_nonfinite and not norm.isfinite():
        raise StepRefusedError(
            RuntimeError(
                f"the norm of order {clipping.norm_type} of the gradients is {norm.item()}, so they are left as they "
                "are; error_if_nonfinite=False scales them all the same"
            )
        )
    given: Any = [
        SimpleNamespace(grad=local_of(own.parameter.grad)) for own in parameters if own.parameter.grad is not None
    ]
    torch.nn.utils.clip_grads_with_norm_(given, clipping.max_norm, exact, clipping.foreach)
    return norm.to(given[0].grad.device) if given else norm


def _row_of(gradients: Sequence[torch.Tensor], clipping: Clipping) -> _Row:
    row = _Row(clipping.max_norm, clipping.norm_type, float(clipping.error_if_nonfinite))
    if not gradients:
        return row
    dtype = functools.reduce(torch.promote_types, (gradient.dtype.to_real() for gradient in gradients))
    row = dataclasses.replace(row, dtype=float(_DTYPES.index(dtype)))
    parts = numbers_of([_part_of(gradient, clipping.norm_type) for gradient in gradients if gradient.numel()])
    return dataclasses.replace(row, has_elements=1.0, part=_together(parts, clipping.norm_type)) if parts else row


def _part_of(gradient: torch.Tensor, p: float) -> torch.Tensor:
    if p == math.inf:
        return gradient.abs().amax()
    if p == -math.inf:
        return gradient.abs().amin()
    return gradient.abs().double().pow(p).sum()


def _together(parts: Sequence[float], p: float) -> float:
    """Where one is nan this is too. One after another: the same bits wherever it is done."""
    if any(math.isnan(part) for part in parts):
        return math.nan
    if math.isinf(p):
        return max(parts) if p > 0 else min(parts)
    return sum(parts)


def _told(transfers: Transfers, mine: _Row) -> list[_Row]:
    """The rows of all ranks: each has its own place in one sum, in which nan and infinities stay what they are."""
    table = torch.zeros(len(transfers.ranks), len(dataclasses.fields(_Row)), dtype=torch.float64, device="cpu")
    table[transfers.ranks.index(transfers.rank)] = torch.tensor(
        dataclasses.astuple(mine), dtype=torch.float64, device="cpu"
    )
    told = transfers.sum("norm", table.flatten()).view(table.shape)
    return [_Row(*row) for row in told.tolist()]


def _check_alike(ranks: Sequence[int], rows: Sequence[_Row]) -> None:
    for name in ("max_norm", "norm_type", "error_if_nonfinite"):
        first = getattr(rows[0], name)
        for rank, row in zip(ranks, rows, strict=True):
            if getattr(row, name) != first:
                text = f"ranks disagree on {name}: {first:g} on rank {ranks[0]}, {getattr(row, name):g} on rank {rank}"
                raise StepRefusedError(ValueError(text))


def _dtype_of(rows: Sequence[_Row]) -> torch.dtype:
    """What all gradients promote to; float32 where there are none."""
    found = [_DTYPES[int(row.dtype)] for row in rows if row.dtype >= 0]
    return functools.reduce(torch.promote_types, found) if found else torch.float32


def _norm_of_rows(rows: Sequence[_Row], p: float) -> torch.Tensor:
    parts = [row.part for row in rows if row.has_elements]
    whole = torch.tensor(_together(parts, p) if parts else 0.0, dtype=torch.float64, device="cpu")
    return whole if math.isinf(p) or not parts else whole.pow(1.0 / p)


def _norm_of_names(transfers: Transfers, mine: dict[str, torch.Tensor]) -> torch.Tensor:
    """The norm of order 0: the number of parameters whose gradient is not all zeros, since torch takes the norm of the
    parameters' norms."""
    counts = numbers_of([gradient.count_nonzero() for gradient in mine.values()])
    found = transfers.gather("norm/names", {name for name, count in zip(mine, counts, strict=True) if count})
    return torch.tensor(float(len(set().union(*found))), dtype=torch.float64, device="cpu")
