"""Functions that torch calls as one, by what they do: of torch's other functions, each of which can be recorded."""

import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F


def body_of(function: Any) -> Callable[..., Any]:
    """A torch function in Python that does not ask modes whether they do it, as those that it calls still do."""
    around = {**function.__globals__, "has_torch_function": lambda _: False}
    body = types.FunctionType(function.__code__, around, function.__name__, function.__defaults__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


def multi_head_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: torch.Tensor | None,
    in_proj_bias: torch.Tensor | None,
    bias_k: torch.Tensor | None,
    bias_v: torch.Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    training: bool = True,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: torch.Tensor | None = None,
    k_proj_weight: torch.Tensor | None = None,
    v_proj_weight: torch.Tensor | None = None,
    static_k: torch.Tensor | None = None,
    static_v: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Samples, heads and queries stay dims of their own, so that each can be sharded; torch's own form makes one of two
    of them. The results lie in memory as torch's do: a dropout behind them draws in that order. What is seldom is
    torch's own form."""
    given = dict(locals())
    is_seldom = add_zero_attn or any(option is not None for option in (bias_k, bias_v, static_k, static_v))
    is_usual = (
        query.dim() == key.dim() == 3
        and key.shape[:2] == value.shape[:2]
        and query.shape[1] == key.shape[1]
        and query.shape[-1] == embed_dim_to_check
        and _fits(attn_mask, (len(query), len(key)), query.shape[1] * num_heads)
        and _fits(key_padding_mask, (query.shape[1], len(key)))
    )
    if is_seldom or not is_usual or (is_causal and attn_mask is None):
        made: tuple[torch.Tensor, torch.Tensor | None] = body_of(F.multi_head_attention_forward)(**given)
        return made
    weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight
    parts = _projected((query, key, value), weights, in_proj_bias)
    q, k, v = (torch.unflatten(part, -1, (num_heads, -1)).transpose(1, 2) for part in parts)
    seen: torch.Tensor | None = None
    if not (is_causal and key_padding_mask is None and not need_weights):
        seen, is_causal = _mask(attn_mask, key_padding_mask, query.dtype, num_heads), False
    shares: torch.Tensor | None = None
    if need_weights:
        scores = q * math.sqrt(1.0 / q.shape[-1]) @ k.transpose(-1, -2)
        shares = F.softmax(scores if seen is None else scores + seen, dim=-1)
        shares = F.dropout(shares, dropout_p, training)
        out = shares @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, seen, dropout_p if training else 0.0, is_causal)
    out = F.linear(out.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    return out, shares.mean(1) if shares is not None and average_attn_weights else shares


def _projected(given: tuple[torch.Tensor, ...], weights: Any, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values, samples first."""
    if isinstance(weights, torch.Tensor):
        if given[0] is given[1] is given[2]:
            return F.linear(given[0].transpose(0, 1), weights, bias).chunk(3, -1)
        weights = weights.chunk(3)
    biases: Any = (None, None, None) if bias is None else bias.chunk(3)
    each = zip(given, weights, biases, strict=True)
    return tuple(F.linear(tensor.transpose(0, 1), weight, own) for tensor, weight, own in each)


def _fits(mask: torch.Tensor | None, shape: tuple[int, int], count: int | None = None) -> bool:
    """Whether that is a mask of this shape, or so many of them; torch's own form says what is wrong with another."""
    if mask is None:
        return True
    is_mask = mask.dtype == torch.bool or mask.is_floating_point()
    return is_mask and mask.shape in (shape, (count, *shape))


def _mask(
    attn_mask: torch.Tensor | None, padding: torch.Tensor | None, dtype: torch.dtype, num_heads: int
) -> torch.Tensor | None:
    """What is added to scores of shape [samples, heads, queries, keys]."""
    added: torch.Tensor | None = None
    if attn_mask is not None:
        added = _added(attn_mask, dtype)
        added = torch.unflatten(added, 0, (-1, num_heads)) if added.dim() == 3 else added
    if padding is not None:
        hidden = _added(padding, dtype)[:, None, None]
        added = hidden if added is None else added + hidden
    return added


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask of what is hidden, or of what is added already."""
    return mask if mask.dtype != torch.bool else torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


OPENED: dict[Callable[..., Any], Callable[..., Any]] = {F.multi_head_attention_forward: multi_head_attention}
"""By the function."""
