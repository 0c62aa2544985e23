"""Tensors whose memory has other values than they have: conjugated and negated views, which torch resolves later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import dtensor_of
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step, spawn

FRONT, BACK = xm.Mesh([0]), xm.Mesh([1])
WHOLE = torch.tensor([[1 + 2j, 3 - 1j], [0.5j, -2 + 0j], [4 - 4j, 1j]])


def moved(local: torch.Tensor, rank: int, **options: Any) -> torch.Tensor:
    source: Any = xm.Spec(tuple(local.shape), local.dtype, FRONT, (Shard(0),))
    if rank == 0:
        source = dtensor_of(local, tuple(local.shape), FRONT, (Shard(0),))
    y: torch.Tensor = xm.reshard(source, BACK, [Replicate()], **options).to_local()
    return y


def reshards(rank: int, world_size: int) -> None:
    for view in (WHOLE.conj(), WHOLE.conj().imag, WHOLE.T.conj(), torch._neg_view(WHOLE), WHOLE.conj()[1:]):
        assert view.is_conj() or view.is_neg()
        y = moved(view, rank)
        if rank == 1:
            assert torch.equal(y, view.resolve_conj().resolve_neg())
    local = torch.zeros_like(WHOLE).conj() if rank == 1 else torch.empty(0, 0, dtype=WHOLE.dtype)
    into = dtensor_of(local, (3, 2), BACK, (Replicate(),))
    with pytest.raises(ValueError, match="received into a conjugated or negated view"):
        moved(WHOLE, rank, out=into)
    assert torch.equal(moved(WHOLE, rank), WHOLE) or rank == 0


class Spectrum(nn.Module):
    """What crosses from stage to stage is conjugated, forwards and backwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.view_as_complex(self.first(x).view(-1, 2, 2)).conj()
        mixed = torch.view_as_real(spectrum.conj() * spectrum + spectrum.conj())
        return self.second(mixed.reshape(-1, 4))  # type: ignore[no-any-return]


def pipeline(rank: int, world_size: int) -> None:
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "num_microbatches": 2}
    reference = Spectrum()
    engine = xm.PipelineEngine(
        Spectrum(), (torch.empty(3, 4),), meshes=[FRONT, BACK], split=xm.split_at("second"), **options
    )
    engine.step(x, target=y)
    serial_step(reference, (x,), target=y, **options)
    for name, parameter in engine.named_parameters():
        mine, theirs = parameter.grad, reference.get_parameter(name).grad
        assert mine is not None
        assert theirs is not None
        torch.testing.assert_close(mine.to_local() if isinstance(mine, DTensor) else mine, theirs)
    engine.close()


def everything(rank: int, world_size: int) -> None:
    reshards(rank, world_size)
    torch.manual_seed(1)
    pipeline(rank, world_size)


def test_lazy_views() -> None:
    spawn(everything, 2, timeout=60)
