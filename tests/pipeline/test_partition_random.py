"""Random models with random skips, cut at random: stages give the model's output and gradients."""

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models.random_graph import KINDS, Graph

from torch_xmesh.pipeline.cut.partition import partition, split_at


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
    assert outputs[0].keys() == outputs[1].keys()
    for name, expected in outputs[0].items():
        assert torch.equal(expected, outputs[1][name])
    for (name, expected), found in zip(whole.named_parameters(), split.parameters(), strict=True):
        assert (expected.grad is None) == (found.grad is None), name
        if expected.grad is not None and found.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad)
    for value in parts.values.values():
        assert all(consumer > (-1 if value.producer is None else value.producer) for consumer in value.consumers)
        assert value.consumers or value.is_output or value.producer is None
