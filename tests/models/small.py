"""Models of a few layers, each with one peculiarity."""

import torch
from torch import nn
from torch.nn import functional as F


class MLP(nn.Module):
    """Linear layers with dropout; [batch, width] to [batch, 3]."""

    def __init__(self, width: int = 6, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        return self.head(x)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """Two LSTMs, sequence first (samples in dim 1); the first one's state starts the second."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first = nn.LSTM(width, width)
        self.middle = nn.Linear(width, width)
        self.second = nn.LSTM(width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        x, state = self.first(sequence)
        x = self.middle(x)
        x, (hidden, _) = self.second(x, state)
        return self.head(x + hidden)  # type: ignore[no-any-return]


class TiedInside(nn.Module):
    """One weight twice within a stage, and a module that is called in several stages."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.shared = nn.LayerNorm(width)
        self.third, self.last = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(torch.tanh(self.second(torch.tanh(self.first(x)))))
        x = self.shared(torch.tanh(self.third(x)))
        return self.last(F.linear(x, self.first.weight))  # type: ignore[no-any-return]


class Scaled(torch.autograd.Function):
    """Doubles; its gradient is three times, so that a lost backward shows."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * 3, None


class CustomFunction(nn.Module):
    """A Python autograd.Function right at the split points and inside a module."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Scaled.apply(self.first(x), 2.0)  # type: ignore[no-untyped-call]
        return self.third(Scaled.apply(torch.tanh(self.second(x)), 0.5))  # type: ignore[no-any-return, no-untyped-call]


class Hooked(nn.Module):
    """Forward hooks that change values and count calls, a parameter hook that changes gradients."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))
        self.calls: list[str] = []
        self.first.register_forward_hook(lambda module, args, output: output * 2)
        self.second.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.second.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
        self.third.register_forward_hook(lambda module, args, output: self.calls.append("third"))
        self.third.weight.register_hook(lambda gradient: gradient * 3)  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.relu(self.second(torch.tanh(self.first(x)))))  # type: ignore[no-any-return]


class Several(nn.Module):
    """Returns several tensors of which some are not used, and looks at some without gradient."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = TwoOutputs(width)
        self.middle, self.unused, self.last = (nn.Linear(width, width) for _ in range(3))

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        used, _ = self.inner(pair[0])
        with torch.no_grad():
            factor = used.abs().amax(1, keepdim=True)
        choice = used.argmax(1, keepdim=True)
        x = self.middle(used)
        x = x / (1 + factor) + torch.gather(x, 1, choice)
        return self.last(x * scale + pair[1])  # type: ignore[no-any-return]


class TwoOutputs(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.first(x)), self.second(x)


class Autocast(nn.Module):
    """Lower precision around some layers only, across a split point."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.first(x)
            x = self.second(torch.matmul(x, x.new_ones(8, 8)))
            x = x + torch.matmul(x, x.transpose(0, 1)).mean()
        return self.third(x.float())  # type: ignore[no-any-return]


class Branching(nn.Module):
    """Control flow on shapes that torch.fx cannot trace; torch.export can."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 3:
            x = self.first(x)
        x = self.drop(torch.relu(x))
        x = self.second(x)
        return self.third(x).view(x.shape[0], 2, 2)  # type: ignore[no-any-return]


class Untraceable(nn.Module):
    """Control flow on data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.sum() > 0:
            x = -x
        return self.second(x)  # type: ignore[no-any-return]
