"""A partition at other sizes of its inputs than the example's: what crosses, and what the stages compute."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
from models import cases
from models.language import GPT, Encoder
from torch import nn

from torch_xmesh.pipeline.cut.partition import partition, split_at


def tokens(samples: int, length: int) -> torch.Tensor:
    return torch.randint(13, (samples, length))


@pytest.mark.parametrize("split", [("blocks.1", "blocks.2", "head"), ("blocks.2",)])
def test_gpt_at_any_length(split: tuple[str, ...]) -> None:
    """The head's view takes the length as an integer of another stage."""
    torch.manual_seed(0)
    model = GPT(tokens=12)
    parts = partition(model, (tokens(2, 6),), split=split_at(*split))
    for samples, length in ((2, 6), (3, 4), (1, 12), (2, 1), (5, 6), (3, 4)):
        x = tokens(samples, length)
        torch.testing.assert_close(parts.run(x), model(x), rtol=0, atol=0)
        sized = parts.for_arguments((x,))
        assert sized.values[sized.stages[-1].output_values[0]].shape_for(samples) == (samples, length, 13)
        if length != 6:
            assert sized is not parts
            assert sized is parts.for_arguments((tokens(samples + 1, length),)), "found again"


def test_several_inputs_and_structured_outputs() -> None:
    torch.manual_seed(0)
    model = Encoder()

    def batch(samples: int, length: int) -> tuple[Any, dict[str, torch.Tensor]]:
        mask = torch.ones(samples, length, dtype=torch.bool)
        mask[:, length - 1] = False
        return (torch.randint(11, (samples, length)),), {"mask": mask, "kinds": torch.randint(2, (samples, length))}

    args, kwargs = batch(2, 5)
    parts = partition(model, args, kwargs, split_at("layers.1", "pooler"))
    for samples, length in ((2, 5), (3, 9), (1, 2)):
        args, kwargs = batch(samples, length)
        torch.testing.assert_close(parts.run(*args, **kwargs), model(*args, **kwargs), rtol=0, atol=0)
    args, kwargs = batch(2, 5)
    with pytest.raises(ValueError, match=r"argument args\[0\] has shape \(2, 7\)(.|\n)*do not work for it"):
        parts.run(torch.zeros(2, 7, dtype=torch.int64), **kwargs)


class Flat(nn.Module):
    """Folds tokens into rows and back: integers of samples and length cross stages; a constant leaves the model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        samples, length, width = x.shape
        rows = samples * length
        pair = (self.a(x.reshape(rows, width)), length)
        y = self.b(pair[0]) / math.sqrt(pair[1])
        y = self.c(y)
        return {"y": y.view(samples, length, 2), "rows": y.view(rows // length, -1), "length": length}


def test_integers_that_cross() -> None:
    torch.manual_seed(0)
    model = Flat()
    parts = partition(model, (torch.randn(2, 3, 4),), split=split_at("b", "c"))
    for samples, length in ((4, 3), (3, 5), (2, 1), (4, 3), (1, 7)):
        x = torch.randn(samples, length, 4)
        found, expected = parts.run(x), model(x)
        assert found.pop("length") == expected.pop("length") == length
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_ready_stages() -> None:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 8)), Pair(), Join()]
    parts = partition(stages, (tokens(2, 6),))
    for samples, length in ((2, 6), (3, 4), (1, 9)):
        x = tokens(samples, length)
        expected = stages[2](*stages[1](stages[0](x)))
        torch.testing.assert_close(parts.run(x), expected, rtol=0, atol=0)


class Pair(nn.Module):
    """Returns the length beside the tensor."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return torch.tanh(x), x.size(1)


class Join(nn.Module):
    """Takes both."""

    def forward(self, x: torch.Tensor, length: int) -> torch.Tensor:
        return x.view(-1, length * 8) / length


class Branch(nn.Module):
    """Does something else for long sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 0.5 if x.size(1) < 4 else 2.0
        return self.b(self.a(x) * scale)  # type: ignore[no-any-return]


def test_a_forward_that_branches_on_sizes_takes_either_way() -> None:
    model = Branch()
    parts = partition(model, (torch.randn(2, 3, 4),), split=split_at("b"))
    for shape in ((5, 3, 4), (2, 5, 4), (3, 5, 4), (2, 3, 4)):
        x = torch.randn(shape)
        assert torch.equal(parts.run(x), model(x))


def test_refuses_what_the_model_does_not_take() -> None:
    parts = partition(GPT(), (tokens(2, 6),), split=split_at("blocks.1"))
    with pytest.raises(ValueError, match=r"has dtype torch.float32, the example had torch.int64"):
        parts.run(torch.zeros(2, 6))
    with pytest.raises(ValueError, match=re.escape("argument args[0] has shape (2, 6, 1), the example had (2, 6)")):
        parts.run(torch.zeros(2, 6, 1, dtype=torch.int64))
    wide = partition(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.zeros(2, 4),), split=split_at("1"))
    with pytest.raises(ValueError, match=r"has shape \(2, 5\), the example had \(2, 4\), and the stages do not work"):
        wide.run(torch.zeros(2, 5))


def test_modules_that_look_at_their_data() -> None:
    """Found on zeros, also after the model's own parameters have become something else."""
    case = next(case for case in cases() if case.name == "moe")
    torch.manual_seed(0)
    model = case.build()
    args, kwargs, _ = case.batch(2)
    parts = partition(model, args, kwargs, split_at(*case.splits[0]))
    shapes = {name: (info.shape[0], 2 * info.shape[1], *info.shape[2:]) for name, info in parts.inputs.items()}
    reference = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    sized = parts.at(shapes)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        parameter.data = other.data
    x = torch.randn(next(iter(shapes.values())))
    torch.testing.assert_close(sized.run(x), reference(x), rtol=0, atol=0)
