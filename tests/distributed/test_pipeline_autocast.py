"""Autocast around a step: received values are in the middle of the model, and no weights."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import spawn


class Float(nn.Module):
    """A layer whose result is float32, also under autocast."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y.float()


class ReadsThrice(nn.Module):
    """As attention does: three layers read one value."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).float() for layer in (self.query, self.key, self.value))
        read: torch.Tensor = q + k * v
        return read


def read_thrice(rank: int, world_size: int) -> float | None:
    """How far, of their largest, the first stage's gradients are from those of one process, which reads no leaf."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), ReadsThrice())
    reference = copy.deepcopy(model)
    x, y = torch.randn(16, 64), torch.randn(16, 64)
    engine = xm.PipelineEngine(
        [nn.Sequential(Float(model[0]), model[1]), model[2]],
        (torch.empty(8, 64),),
        meshes=[xm.Mesh([0]), xm.Mesh([1])],
        num_microbatches=2,
        loss_fn=F.mse_loss,
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine.step(x, target=y)
    for part in range(2):
        mine = slice(8 * part, 8 * part + 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(reference[2](reference[1](reference[0](x[mine]).float())), y[mine])
        torch.autograd.backward(loss / 2)
    expected = dict(reference.named_parameters())["0.weight"].grad
    found = next((one.grad for name, one in engine.named_parameters() if name.endswith("0.layer.weight")), None)
    engine.close()
    if rank == 1:
        return None
    assert found is not None
    assert expected is not None
    return float((found - expected).abs().max() / expected.abs().max())


def test_autocast_of_a_value_that_several_layers_read() -> None:
    distances = spawn(read_thrice, 2, timeout=60)
    assert distances == [0.0, None]
