"""Models of the zoo of libraries as their users call them: with positional arguments, most without labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.libraries import MODELS
from torch import nn

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "GPT-2": ("input_ids", "labels"),
    "Llama": ("input_ids",),
    "Llama with checkpoints": ("input_ids",),
    "BERT": ("input_ids", "attention_mask"),
    "ViT": ("pixel_values",),
    "T5": ("input_ids", "decoder_input_ids"),
    "Mixtral": ("input_ids",),
    "Qwen3-MoE": ("input_ids", "labels"),
    "OLMoE": ("input_ids",),
    "ResNet-50": ("x",),
    "nn.TransformerEncoder": ("src",),
}
"""The first is given by position, the others by name."""
_OPTIONS: dict[str, dict[str, Any]] = {"Qwen3-MoE": {"router_aux_loss_coef": 0.1}, "OLMoE": {"num_experts": 8}}


def made(name: str, **options: Any) -> Made:
    """In single precision, with a batch of eight samples; `options` are of its configuration."""
    family = name.removesuffix(" with checkpoints")
    case = MODELS[family]
    if case.library != "torch":
        pytest.importorskip(case.library, reason=f"{case.library} is not installed: pip install -e .[models]")
    model: Any = case.as_it_comes(**{**_OPTIONS.get(name, {}), **options})
    if name != family:
        model.train()
        model.activation_checkpointing_enable()
    given = {key: one.float() if one.is_floating_point() else one for key, one in case.batch(8).items()}
    if "attention_mask" in given:
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    if "labels" in given:
        given["decoder_input_ids"] = given["labels"]
    first, *others = ARGUMENTS[name]
    return model, (given[first],), {key: given[key] for key in others}
