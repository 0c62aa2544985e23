"""What can be run on whole tensors only is called as one, with its module, and trains as in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from planned_cases import OPTIONS, PLANS, train_alike
from torch import nn
from torch.nn.utils import parametrizations

import torch_xmesh as xm
from torch_xmesh.testing import spawn


class Discriminator(nn.Module):
    """Convolutions and layers with spectral norm, of both kinds that torch has; [samples, 16] to [samples, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.spectral_norm(nn.Linear(16, 32))
        self.convolution = parametrizations.spectral_norm(nn.Conv1d(2, 4, 3, padding=1))
        self.old = nn.utils.spectral_norm(nn.Linear(64, 32))
        self.last = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu().view(-1, 2, 16)
        out: torch.Tensor = self.last(self.old(self.convolution(hidden).flatten(1)).relu())
        return out


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.other(self.one(x).tanh())
        return out


class Forces(nn.Module):
    """Minus the energy's gradient by where things are; the graph goes on through it."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Energy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return -gradient


class Molecule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.forces, self.last = nn.Linear(16, 16), Forces(), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.forces(self.embed(x)))
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {"spectral norm": Discriminator, "forces": Molecule}


def trains(rank: int, world_size: int, name: str, is_training: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double().train(is_training)
    x, target = torch.randn(16, 16, dtype=torch.float64), torch.randn(16, 4, dtype=torch.float64)
    for key, make in PLANS.items():
        try:
            train_alike(model, x, target, make(model, (x[:8],)), 2)
        except Exception as error:
            raise AssertionError(f"{key}: {error}") from error


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_models_train(name: str, is_training: bool) -> None:
    spawn(trains, 4, name, is_training)


class Writes(nn.Module):
    """The energy is written into another tensor before it is differentiated in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.gradient = Energy(), Gradient()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x * 2
        energies = torch.zeros(len(x), 2)
        energies[:, :1] = self.energy(hidden)
        out: torch.Tensor = self.gradient(energies, hidden)
        return out


class Gradient(nn.Module):
    def forward(self, energies: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        (out,) = torch.autograd.grad(energies.sum(), x, create_graph=True)
        return out


class OwnVector(nn.Module):
    """The model itself has the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 4)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x) - self.mean
        torch.mean(out.detach(), 0, out=self.mean)
        return out


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (OwnVector, "buffer mean is changed by the forward.*a module other than the model itself"),
        (Writes, "calls torch.autograd.grad, at .*a module other than the model itself"),
        (Forces, "calls torch.autograd.grad, at .*test_called_whole.py:.*a module other than the model itself"),
    ],
)
def test_in_the_model_itself_it_is_refused(make: Callable[[], nn.Module], words: str) -> None:
    x = torch.zeros(8, 16, requires_grad=True)
    for plan in (xm.plan_parallel, xm.presets.data_parallel):
        with pytest.raises(ValueError, match=words):
            plan(make(), (x,), **OPTIONS)
