"""What a library's model is to a test: how it is built, its batches and its loss."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

Batch = dict[str, Any]
VOCABULARY = 64


@dataclasses.dataclass(frozen=True)
class LibraryModel:
    """A model of a library.

    Attributes:
        make: builds it with random weights; options of transformers' models replace those of their configurations.
        batch: arguments of a forward of so many samples by name, the first of its signature first, random from torch's
            generator. Those of language models (not Mamba's) take the options of :func:`text`, too.
        dtype: of its parameters.
    """

    library: str
    name: str
    make: Callable[..., nn.Module]
    batch: Callable[..., Batch]
    dtype: torch.dtype = torch.float64

    def as_it_comes(self, **options: Any) -> nn.Module:
        """As its library makes it: in single precision, with the cache that it has by default."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.make(**options)

    def build(self) -> nn.Module:
        """In training mode, without a cache."""
        model = self.as_it_comes()
        config = getattr(model, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False  # type: ignore[union-attr]
        return model.to(self.dtype).train()


def loss_of(output: Any) -> torch.Tensor:
    """The model's own loss, where it was given labels; else the mean square of each floating-point output, summed."""
    own = getattr(output, "loss", None)
    if own is not None:
        return own  # type: ignore[no-any-return]
    leaves = pytree.tree_leaves(dict(output) if hasattr(output, "keys") else output)
    floats = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return torch.stack([leaf.double().square().mean() for leaf in floats]).sum()


def without_chance(model: nn.Module) -> None:
    """Sets every probability of dropping something to 0: stages draw random numbers with seeds of their own."""
    for module in model.modules():
        for name, value in vars(module).items():
            is_number = isinstance(value, float) and 0 < value < 1
            if is_number and (name == "p" or "drop" in name):
                setattr(module, name, 0.0)


def tokens(samples: int, length: int = 12) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (samples, length))


def text(samples: int, length: int = 12, num_padded: int = 1) -> Batch:
    """Tokens; the first `num_padded` samples end in padding. They are the labels, too, which the models shift."""
    given = tokens(samples, length)
    mask = torch.ones_like(given)
    mask[:num_padded, -3:] = 0
    return {"input_ids": given, "attention_mask": mask, "labels": given}


def pictures(size: int, name: str = "pixel_values") -> Callable[[int], Batch]:
    return lambda samples: {name: torch.randn(samples, 3, size, size, dtype=torch.float64)}
