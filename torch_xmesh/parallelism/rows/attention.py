"""Attention as one operator."""

import math

from torch_xmesh.parallelism.loops import Labels, Loops
from torch_xmesh.parallelism.rows.registry import Call, Tensor, broadcast, extents_of, labels_like, row


@row("scaled_dot_product_attention")
def scaled_dot_product_attention(call: Call) -> Loops:
    """Batch and heads are loops, and queries where none is masked by its place; keys, and what a head is long, are
    whole. Groups of heads that share keys and values stay together."""
    query, key, value = call.tensor(0, "query"), call.tensor(1, "key"), call.tensor(2, "value")
    mask, is_causal = call.get(3, "attn_mask"), bool(call.get(5, "is_causal", False))
    batch = labels_like(query.shape[:-2], "b")
    queries = None if is_causal else "i"
    output: Labels = (*batch, queries, None)
    extents = extents_of((*batch, queries), query.shape[:-1])
    for one in (key, value):
        for label, mine, theirs in zip(batch, query.shape[:-2], one.shape[:-2], strict=True):
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


@row("multi_head_attention_forward")
def multi_head_attention(call: Call) -> Loops:
    """torch.nn.MultiheadAttention as one call: the batch is its loop, its second dim."""
    query, key, value = call.tensor(0, "query"), call.tensor(1, "key"), call.tensor(2, "value")
    if len(query.shape) != 3:
        raise ValueError("attention without a batch")
    if isinstance(call.get(21, "static_k"), Tensor) or isinstance(call.get(22, "static_v"), Tensor):
        raise ValueError("keys or values whose batch and heads are one dim")
    inputs: dict[int, Labels] = {one.index: (None,) * len(one.shape) for one in call.tensors}
    for one in (query, key, value):
        inputs[one.index] = (None, "n", None)
    padding = call.get(14, "key_padding_mask")
    if isinstance(padding, Tensor):
        inputs[padding.index] = ("n", None)
    mask = call.get(16, "attn_mask")
    if isinstance(mask, Tensor) and len(mask.shape) == 3:
        raise ValueError("a mask for each sample and head")
    length, batch, width = query.shape
    flops = batch * (2.0 * length * 4 * width * width + 4.0 * length * key.shape[0] * width)
    if query.shape == (batch, length, key.shape[0]) and call.get(15, "need_weights", True):
        raise ValueError("weights that look like the output")
    outputs = tuple(
        (None, "n", None) if shape == query.shape else ("n", *[None] * (len(shape) - 1)) for shape in call.shapes
    )
    reads = tuple(inputs.get(i) for i in range(call.num_tensors))
    return Loops(reads, outputs, {"n": batch} if batch > 1 else {}, is_heavy=True, flops=flops)
