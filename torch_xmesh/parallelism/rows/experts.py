"""Experts of mixtures, as modules that are called as one."""

import math

from torch import nn

from torch_xmesh.parallelism.loops import Labels, Loops, Within
from torch_xmesh.parallelism.rows.registry import CallForm, Tensor, row

CLASSES = (
    "MixtralExperts",
    "Qwen2MoeExperts",
    "Qwen3MoeExperts",
    "OlmoeExperts",
    "GraniteMoeExperts",
)
"""Names of transformers' classes whose experts are alike."""


def has_row(module: nn.Module) -> bool:
    """Whether a module is one of these, and not a class of somebody else's of that name."""
    kind = type(module)
    return kind.__name__ in CLASSES and kind.__module__.startswith("transformers.")


@row(*CLASSES)
def experts(call: CallForm) -> Loops:
    """transformers' experts: (hidden states, which experts each token goes to, with which weights), and parameters
    whose first dim is the experts'.

    Loops: tokens; experts that all tokens are shown to, whose results add up; and experts that tokens are sent to and
    fetched from (D. Lepikhin et al., GShard, 2020).
    """
    hidden, index, weights = (
        call.tensor(0, "hidden_states"),
        call.tensor(1, "top_k_index"),
        call.tensor(2, "top_k_weights"),
    )
    up, down = call.kwargs.get("gate_up_proj"), call.kwargs.get("down_proj")
    if not isinstance(up, Tensor) or not isinstance(down, Tensor) or len(hidden.shape) != 2 or len(call.tensors) != 5:
        raise ValueError("experts with other parameters")
    num_tokens, width = hidden.shape
    num_experts, inner = down.shape[0], down.shape[2]
    inputs: dict[int, Labels] = {tensor.index: (None,) * len(tensor.shape) for tensor in call.tensors}
    for tensor in (hidden, index, weights):
        inputs[tensor.index] = ("t|routed", None)
    inputs[up.index] = inputs[down.index] = ("shown|routed", None, None)
    extents = {"t": num_tokens, "shown": num_experts, "routed": math.gcd(num_tokens, num_experts)}
    sent = Within("routed", "all-to-all", hidden.num_bytes * index.shape[1], ("t",), num_forward=2, num_backward=2)
    flops = 2.0 * num_tokens * index.shape[1] * 3 * width * inner
    usable = {label: extent for label, extent in extents.items() if extent > 1}
    return call.loops(inputs, ("t|routed", None), usable, is_heavy=True, flops=flops, within=(sent,))
