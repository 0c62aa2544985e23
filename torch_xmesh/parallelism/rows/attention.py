"""Attention as one operator."""

import math

from torch_xmesh.parallelism.loops import Labels, Loops
from torch_xmesh.parallelism.rows.registry import CallForm, Tensor, broadcast, extents_of, labels_like, row


@row("scaled_dot_product_attention")
def scaled_dot_product_attention(call: CallForm) -> Loops:
    """Batch and heads are loops, and queries where none is masked by its place; keys, and what a head is long, are
    whole. Groups of heads that share keys and values stay together."""
    query, key, value = call.tensor(0, "query"), call.tensor(1, "key"), call.tensor(2, "value")
    mask, is_causal = call.get(3, "attn_mask"), bool(call.get(5, "is_causal", False))
    batch = labels_like(query.shape[:-2], "b")
    queries = None if is_causal else "i"
    output: Labels = (*batch, queries, None)
    extents = extents_of((*batch, queries), query.shape[:-1])
    for operand in (key, value):
        for label, mine, theirs in zip(batch, query.shape[:-2], operand.shape[:-2], strict=True):
            if label in extents and mine != theirs:
                extents[label] = math.gcd(mine, theirs)
    inputs: dict[int, Labels] = {
        query.index: output,
        key.index: (*batch, None, None),
        value.index: (*batch, None, None),
    }
    if isinstance(mask, Tensor):
        inputs[mask.index] = broadcast(mask, (*batch, queries, None), (*query.shape[:-1], key.shape[-2]))
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    flops = 2.0 * pairs * (query.shape[-1] + value.shape[-1]) * (0.5 if is_causal else 1.0)
    usable = {label: extent for label, extent in extents.items() if extent > 1}
    return call.loops(inputs, output, usable, is_heavy=True, flops=flops)
