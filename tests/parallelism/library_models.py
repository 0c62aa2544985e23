"""Models of libraries, small and with random weights: each with the arguments of a forward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
DECODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
TOKENS = torch.zeros(8, 16, dtype=torch.int64)


def _transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed: pip install -e .[models]")


def _quietly(make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*args)


def gpt2() -> Made:
    library = _transformers()
    config = library.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=96, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return _quietly(library.GPT2LMHeadModel, config), (TOKENS,), {"labels": TOKENS}


def llama() -> Made:
    library = _transformers()
    config = library.LlamaConfig(**DECODER)
    return _quietly(library.LlamaForCausalLM, config), (TOKENS,), {}


def llama_with_checkpoints() -> Made:
    model, args, kwargs = llama()
    model.train()
    for enable in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):  # by version
        if hasattr(model, enable):
            getattr(model, enable)()
            break
    return model, args, kwargs


def bert() -> Made:
    library = _transformers()
    config = library.BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=96
    )
    model = _quietly(library.BertForMaskedLM, config)
    return model, (TOKENS,), {"attention_mask": torch.ones_like(TOKENS)}


def vit() -> Made:
    library = _transformers()
    config = library.ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        num_labels=12,
    )
    return _quietly(library.ViTForImageClassification, config), (torch.zeros(8, 3, 32, 32),), {}


def t5() -> Made:
    library = _transformers()
    config = library.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=96)
    model = _quietly(library.T5ForConditionalGeneration, config)
    return model, (TOKENS,), {"decoder_input_ids": TOKENS}


def mixtral() -> Made:
    library = _transformers()
    config = library.MixtralConfig(**DECODER, num_local_experts=4)
    return _quietly(library.MixtralForCausalLM, config), (TOKENS,), {}


def qwen3_moe() -> Made:
    library = _transformers()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = library.Qwen3MoeConfig(**DECODER, **experts, head_dim=16, router_aux_loss_coef=0.1)
    return _quietly(library.Qwen3MoeForCausalLM, config), (TOKENS,), {"labels": TOKENS}


def olmoe() -> Made:
    library = _transformers()
    config = library.OlmoeConfig(**DECODER, num_experts=8, num_experts_per_tok=2, pad_token_id=0)
    return _quietly(library.OlmoeForCausalLM, config), (TOKENS,), {}


def resnet50() -> Made:
    library = pytest.importorskip("torchvision", reason="torchvision is not installed: pip install -e .[models]")
    return library.models.resnet50(), (torch.zeros(8, 3, 64, 64),), {}


def encoder() -> Made:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 2), (torch.zeros(8, 16, 64),), {}


MODELS: dict[str, Callable[[], Made]] = {
    "GPT-2": gpt2,
    "Llama": llama,
    "Llama with checkpoints": llama_with_checkpoints,
    "BERT": bert,
    "ViT": vit,
    "T5": t5,
    "Mixtral": mixtral,
    "Qwen3-MoE": qwen3_moe,
    "OLMoE": olmoe,
    "ResNet-50": resnet50,
    "nn.TransformerEncoder": encoder,
}
