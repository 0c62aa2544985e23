"""Tiny random models of libraries, as their users have them: defaults are left alone. Needs pyproject.toml's extra
`models`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 64
Batch = dict[str, torch.Tensor]


def _text(samples: int, length: int, is_padded: bool) -> Batch:
    tokens = torch.randint(3, VOCABULARY, (samples, length))
    mask = torch.ones_like(tokens)
    if is_padded:
        mask[: samples // 2, -3:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def _translation(samples: int, length: int, is_padded: bool) -> Batch:
    return {**_text(samples, length, is_padded), "labels": torch.randint(3, VOCABULARY, (samples, 7))}


def _sentences(samples: int, length: int, is_padded: bool) -> Batch:
    """Without a mask: the model finds each sentence's last token itself."""
    tokens = torch.randint(3, VOCABULARY, (samples, length))
    if is_padded:
        tokens[: samples // 2, -3:] = 0
    return {"input_ids": tokens, "labels": torch.randint(0, 3, (samples,))}


def _pictures(samples: int, length: int, is_padded: bool) -> Batch:
    return {"pixel_values": torch.randn(samples, 3, 16, 16), "labels": torch.randint(0, 5, (samples,))}


def _speech(samples: int, length: int, is_padded: bool) -> Batch:
    return {"input_features": torch.randn(samples, 8, 32), "labels": torch.randint(3, VOCABULARY, (samples, 7))}


@dataclasses.dataclass(frozen=True)
class LibraryCase:
    """A model, its batches (samples, length, whether half of them are padded), and where two and three stages start."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int, bool], Batch]
    splits: tuple[tuple[str, ...], tuple[str, ...]]


def _decoder(kind: Any, config: Any, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        settings = {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **options,
        }
        model: nn.Module = kind(config(**settings))
        return model

    return build


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64
    )
    model: nn.Module = transformers.BertForMaskedLM(config)
    return model


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def _bart() -> nn.Module:
    config = transformers.BartConfig(**_SEQ2SEQ, forced_eos_token_id=2)
    model: nn.Module = transformers.BartForConditionalGeneration(config)
    return model


def _whisper() -> nn.Module:
    sizes = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
    config = transformers.WhisperConfig(**_SEQ2SEQ, **sizes, suppress_tokens=None, begin_suppress_tokens=None)
    model: nn.Module = transformers.WhisperForConditionalGeneration(config)
    return model


def _vit() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    model: nn.Module = transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5)
    )
    return model


_LAYERS = (("model.layers.1",), ("model.layers.1", "model.layers.2.mlp"))
_GEMMA = transformers.Gemma3TextConfig
_MOE = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
CASES = {
    case.name: case
    for case in (
        LibraryCase("gpt2", _gpt2, _text, (("transformer.h.1",), ("transformer.h.1", "transformer.ln_f"))),
        LibraryCase("llama", _decoder(transformers.LlamaForCausalLM, transformers.LlamaConfig), _text, _LAYERS),
        LibraryCase(
            "qwen3", _decoder(transformers.Qwen3ForCausalLM, transformers.Qwen3Config, head_dim=8), _text, _LAYERS
        ),
        LibraryCase("gemma3", _decoder(transformers.Gemma3ForCausalLM, _GEMMA, head_dim=8), _text, _LAYERS),
        LibraryCase("mistral", _decoder(transformers.MistralForCausalLM, transformers.MistralConfig), _text, _LAYERS),
        LibraryCase(
            "mixtral",
            _decoder(
                transformers.MixtralForCausalLM,
                transformers.MixtralConfig,
                num_local_experts=4,
                output_router_logits=True,
            ),
            _text,
            (("model.layers.1",), ("model.layers.1", "model.layers.2")),
        ),
        LibraryCase(
            "qwen2_moe",
            _decoder(transformers.Qwen2MoeForCausalLM, transformers.Qwen2MoeConfig, output_router_logits=True, **_MOE),
            _text,
            (("model.layers.1",), ("model.layers.1", "model.layers.2")),
        ),
        LibraryCase(
            "classifier",
            _decoder(transformers.LlamaForSequenceClassification, transformers.LlamaConfig, num_labels=3),
            _sentences,
            (("model.layers.1",), ("model.layers.1", "score")),
        ),
        LibraryCase("bert", _bert, _text, (("bert.encoder.layer.1",), ("bert.encoder.layer.1", "cls"))),
        LibraryCase("t5", _t5, _translation, (("decoder",), ("decoder.block.0", "decoder.block.1"))),
        LibraryCase("bart", _bart, _translation, (("model.decoder",), ("model.decoder.layers.0", "lm_head"))),
        LibraryCase("whisper", _whisper, _speech, (("model.decoder",), ("model.encoder.layers.1", "model.decoder"))),
        LibraryCase("vit", _vit, _pictures, (("vit.layers.1",), ("vit.layers.1", "classifier"))),
    )
}
