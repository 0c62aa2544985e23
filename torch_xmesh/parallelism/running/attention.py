"""Attention on a device's part of the samples and heads."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from torch_xmesh.parallelism.running.local_rules import Local


def attention(local: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Where weights are dropped it is computed step by step, as torch does on cpu."""
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal"]
    given: dict[str, Any] = dict(zip(names, args, strict=False)) | dict(kwargs)
    if not given.get("dropout_p"):
        return local.function(*args, **kwargs)
    query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    if given.get("enable_gqa"):
        key, value = (operand.repeat_interleave(query.shape[-3] // operand.shape[-3], -3) for operand in (key, value))
    scale = given.get("scale")
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    hidden = None
    if given.get("is_causal"):
        hidden = ~torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    elif mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else mask == -math.inf
        scores = scores if mask.dtype == torch.bool else scores + mask
    if hidden is not None:
        empty = hidden.all(-1, keepdim=True)  # a query that sees no key gets zeros
        weights = scores.masked_fill(hidden, -math.inf).masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    else:
        weights = scores.softmax(-1)
    whole = torch.ones(*local.operator.makes[0].shape[:-1], key.shape[-2], dtype=weights.dtype, device=weights.device)
    kept = local.part_of(F.dropout(whole, given["dropout_p"], training=True))
    return weights * kept @ value
