"""The state from which an optimizer starts for a parameter that it has not stepped yet."""

import copy
import inspect
from collections import defaultdict
from typing import Any

import torch
from torch import nn


def initial_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """What ``optimizer.state[parameter]`` would be before the parameter's first step; neither of them is changed.

    torch's optimizers make this state in ``_init_group``. One that has none, or makes it later, takes a step of
    learning rate 0 on a copy with a gradient of zeros; a key "step" is then set back to 0.

    Args:
        group: the optimizer's param group that holds the parameter.

    Returns:
        tensors (and other values) by key; empty for an optimizer without state.
    """
    twin = nn.Parameter(parameter.detach().clone())
    twin.grad = torch.zeros_like(twin)
    fresh = copy.copy(optimizer)  # without the hooks
    fresh.state = defaultdict(dict)
    fresh.param_groups = [{**group, "params": [twin]}]
    make = getattr(fresh, "_init_group", None)
    if make is not None:
        lists = len(inspect.signature(make).parameters) - 1
        make(fresh.param_groups[0], *([] for _ in range(lists)))
    if fresh.state[twin]:
        return dict(fresh.state[twin])
    fresh.param_groups[0].update({key: 0.0 for key in ("lr", "weight_decay") if key in group})
    fresh.step()
    state = dict(fresh.state[twin])
    if "step" in state:
        state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], torch.Tensor) else 0
    return state
