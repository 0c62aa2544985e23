"""Functions that are recorded by what they do: they do what torch's do, and what they make lies in memory as there."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from torch_xmesh.pipeline.capture.opened_functions import OPENED

WIDTH, HEADS, LENGTH, KEYS, SAMPLES = 12, 3, 5, 7, 4
PADDING = torch.arange(KEYS) >= torch.tensor([[3], [7], [5], [1]])
MASKS: dict[str, torch.Tensor | None] = {
    "none": None,
    "hidden": torch.rand(LENGTH, KEYS, generator=torch.Generator().manual_seed(0)) > 0.8,
    "added": torch.randn(LENGTH, KEYS, generator=torch.Generator().manual_seed(1)),
    "each": torch.randn(SAMPLES * HEADS, LENGTH, KEYS, generator=torch.Generator().manual_seed(2)),
}


def compare(given: dict[str, Any]) -> None:
    """Results, their strides, and gradients of all that is given."""
    found = []
    for function in (F.multi_head_attention_forward, OPENED[F.multi_head_attention_forward]):
        torch.manual_seed(5)
        leaves = {
            id(one): one.detach().clone().requires_grad_(one.is_floating_point())
            for one in given.values()
            if isinstance(one, torch.Tensor)
        }
        made = function(**{key: leaves.get(id(one), one) for key, one in given.items()})
        results = [one for one in made if one is not None]
        torch.autograd.backward(results, results)
        strides = [one if one is None else one.stride() for one in made]
        found.append((made, strides, [leaf.grad for leaf in leaves.values()]))
    assert found[0][1] == found[1][1]
    torch.testing.assert_close(found[1][0], found[0][0], equal_nan=True)  # rows that attend to nothing are nan
    torch.testing.assert_close(found[1][2], found[0][2], equal_nan=True)


def weights(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.randn(*shape, dtype=torch.float64) * 0.3 for name, shape in shapes.items()}


def attention(**more: Any) -> dict[str, Any]:
    torch.manual_seed(4)
    given = weights(
        query=(LENGTH, SAMPLES, WIDTH),
        key=(KEYS, SAMPLES, WIDTH),
        in_proj_weight=(3 * WIDTH, WIDTH),
        in_proj_bias=(3 * WIDTH,),
        out_proj_weight=(WIDTH, WIDTH),
        out_proj_bias=(WIDTH,),
    )
    usual: dict[str, Any] = {
        "value": given["key"],
        "embed_dim_to_check": WIDTH,
        "num_heads": HEADS,
        "bias_k": None,
        "bias_v": None,
        "add_zero_attn": False,
        "dropout_p": 0.0,
    }
    return {**given, **usual, **more}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
def test_multi_head_attention(mask: str, padding: torch.Tensor | None) -> None:
    """With all masks, weights asked for and not, dropped and not."""
    one = MASKS[mask]
    attn_mask = one.double() if one is not None and one.is_floating_point() else one
    for need_weights, average, dropout_p, training in itertools.product(
        (True, False), (True, False), (0.0, 0.3), (True, False)
    ):
        more = {"need_weights": need_weights, "average_attn_weights": average, "training": training}
        compare(attention(attn_mask=attn_mask, key_padding_mask=padding, dropout_p=dropout_p, **more))


def test_multi_head_attention_to_itself() -> None:
    """Queries, keys and values are one, with and without biases, and each sees what is before it."""
    before = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for need_weights, has_bias in itertools.product((True, False), (True, False)):
        given = attention(need_weights=need_weights, attn_mask=before, is_causal=True)
        given |= {"key": given["query"], "value": given["query"]}
        given |= {} if has_bias else {"in_proj_bias": None, "out_proj_bias": None}
        compare(given)
        compare({**given, "key_padding_mask": PADDING[:, :LENGTH]})


def test_multi_head_attention_of_other_widths() -> None:
    torch.manual_seed(6)
    more = weights(
        key=(KEYS, SAMPLES, 8),
        value=(KEYS, SAMPLES, 6),
        q_proj_weight=(WIDTH, WIDTH),
        k_proj_weight=(WIDTH, 8),
        v_proj_weight=(WIDTH, 6),
    )
    compare(attention(**more, in_proj_weight=None, use_separate_proj_weight=True))


def test_multi_head_attention_that_is_seldom() -> None:
    biases = weights(bias_k=(1, 1, WIDTH), bias_v=(1, 1, WIDTH))
    for more in ({"add_zero_attn": True}, biases, {**biases, "need_weights": False}):
        compare(attention(**more))
    for odd in (torch.zeros(LENGTH, 1), torch.zeros(LENGTH, KEYS, dtype=torch.int64)):
        with pytest.raises((RuntimeError, AssertionError), match="mask"):
            OPENED[F.multi_head_attention_forward](**attention(attn_mask=odd))
    usual = attention()
    one = usual["key"][:, :1]
    for others in ({"key": one, "value": one}, {"value": one}):
        with pytest.raises((RuntimeError, AssertionError)):
            OPENED[F.multi_head_attention_forward](**{**usual, **others})
    alone = attention(query=torch.randn(LENGTH, WIDTH).double(), key=torch.randn(KEYS, WIDTH).double())
    compare({**alone, "value": alone["key"]})
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        OPENED[F.multi_head_attention_forward](**attention(is_causal=True, need_weights=False))
