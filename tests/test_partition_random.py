"""Random models with random skips, cut at random: stages give the model's output and gradients."""

import copy
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torch_xmesh.pipeline.partition import partition, split_at

KINDS = ("linear", "pair", "table", "mask", "integer", "inplace", "product")


class Step(nn.Module):
    """A module of one kind; "pair" returns a tuple, "table" a dict with an integer tensor."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(self.linear(x))
        if self.kind == "pair":
            return y, x.detach() * 2
        if self.kind == "table":
            return {"y": y, "best": y.argmax(1)}
        return y


class Graph(nn.Module):
    """Steps whose inputs are sums of earlier values; `plan[i]` is (kind, indices of earlier values)."""

    def __init__(self, plan: list[tuple[str, list[int]]], width: int = 3) -> None:
        super().__init__()
        self.plan = plan
        self.steps = nn.ModuleList(Step(kind, width) for kind, _ in plan)
        self.table = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        values, masks, length = [x, y], [x > 0], x.shape[0]
        for (kind, sources), step in zip(self.plan, self.steps, strict=True):
            received = values[sources[0] % len(values)]
            for source in sources[1:]:
                received = received + values[source % len(values)]
            made = step(received)
            if kind == "pair":
                made = made[0] * made[1]
            elif kind == "table":
                made = made["y"] + torch.nn.functional.one_hot(made["best"], made["y"].shape[1])
            elif kind == "mask":
                masks.append(made > 0.1)
            elif kind == "integer":
                made = made.reshape(length, -1) / length
            elif kind == "inplace":
                made = made.mul(1).add_(self.table)
            elif kind == "product":
                made = made * masks[sources[0] % len(masks)]
            values.append(made)
        return {"last": values[-1], "middle": values[len(values) // 2], "sum": values[-1].sum(1)}


@st.composite
def models(draw: st.DrawFn) -> tuple[list[tuple[str, list[int]]], list[int], int]:
    length = draw(st.integers(2, 7))
    plan = [
        (draw(st.sampled_from(KINDS)), draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))) for _ in range(length)
    ]
    starts = sorted(draw(st.sets(st.integers(1, length - 1), min_size=1, max_size=4)))
    return plan, starts, draw(st.integers(1, 4))


@settings(max_examples=120)
@given(models())
def test_random_models_cut_at_random(case: tuple[list[tuple[str, list[int]]], list[int], int]) -> None:
    plan, starts, samples = case
    torch.manual_seed(0)
    whole = Graph(plan)
    split = copy.deepcopy(whole)
    example = (torch.empty(3, 3, device="meta"), torch.empty(3, 3, device="meta"))
    parts = partition(split, example, None, split_at(*(f"steps.{start}" for start in starts)))
    assert parts.num_stages == len(starts) + 1
    x, y = torch.randn(samples, 3), torch.randn(samples, 3)
    outputs = [whole(x, y), parts.run(x, y)]
    for output in outputs:
        (output["last"].square().sum() + output["middle"].sum() + output["sum"].prod()).backward()
    for name, expected in outputs[0].items():
        assert torch.equal(expected, outputs[1][name])
    for (name, expected), found in zip(whole.named_parameters(), split.parameters(), strict=True):
        assert (expected.grad is None) == (found.grad is None), name
        if expected.grad is not None and found.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad)
    for value in parts.values.values():
        assert all(consumer > (-1 if value.producer is None else value.producer) for consumer in value.consumers)
        assert value.consumers or value.is_output or value.producer is None
