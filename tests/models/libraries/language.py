"""transformers' language models."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from models.libraries.case import VOCABULARY, Batch, LibraryModel, text, tokens

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
_BOTH: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
}


def of_transformers(kind: str, config: str, **options: Any) -> Callable[..., nn.Module]:
    """Builds transformers' model of this class from a configuration of that class."""

    def make(**others: Any) -> nn.Module:
        with torch.random.fork_rng():  # importing the library draws random numbers, the first time
            import transformers

            model, settings = getattr(transformers, kind), getattr(transformers, config)
        made: nn.Module = model(settings(**{**options, **others}))
        return made

    return make


def _model(name: str, kind: str, config: str, batch: Callable[..., Batch] = text, **options: Any) -> LibraryModel:
    return LibraryModel("transformers", name, of_transformers(kind, config, **options), batch)


def _decoder(name: str, family: str, **options: Any) -> LibraryModel:
    return _model(name, f"{family}ForCausalLM", f"{family}Config", **{**_DECODER, **options})


def _experts(name: str, family: str, **options: Any) -> LibraryModel:
    """In single precision: torch multiplies grouped matrices in no other of these."""
    return dataclasses.replace(_decoder(name, family, **options), dtype=torch.float32)


def _encoder(name: str, family: str, **options: Any) -> LibraryModel:
    return _model(name, f"{family}ForMaskedLM", f"{family}Config", **{**_ENCODER, **options})


def _translation(samples: int, **options: int) -> Batch:
    return {**text(samples, **options), "labels": tokens(samples, 8)}


def _sentences(samples: int, **options: int) -> Batch:
    return {**text(samples, **options), "labels": torch.randint(0, 3, (samples,))}


_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

LANGUAGE = (
    _model("GPT-2", "GPT2LMHeadModel", "GPT2Config", **_GPT2),
    _model("GPT-J", "GPTJForCausalLM", "GPTJConfig", **_GPT2, rotary_dim=4),
    _decoder("GPT-NeoX", "GPTNeoX"),
    _decoder("OPT", "OPT", ffn_dim=64, word_embed_proj_dim=32),
    _model(
        "BLOOM",
        "BloomForCausalLM",
        "BloomConfig",
        vocab_size=VOCABULARY,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        pad_token_id=0,
    ),
    _decoder("Falcon", "Falcon"),
    _decoder("Llama", "Llama"),
    _decoder("Mistral", "Mistral", sliding_window=4),
    _decoder("Qwen2", "Qwen2"),
    _decoder("Qwen3", "Qwen3", head_dim=8),
    _decoder("Gemma 2", "Gemma2", head_dim=8, sliding_window=4),
    _model("Gemma 3", "Gemma3ForCausalLM", "Gemma3TextConfig", **_DECODER, head_dim=8, sliding_window=4),
    _decoder("Phi", "Phi"),
    _decoder("Phi-3", "Phi3"),
    _decoder("OLMo 2", "Olmo2"),
    _decoder("Cohere", "Cohere"),
    _decoder("Granite", "Granite"),
    _decoder("StarCoder2", "Starcoder2"),
    _experts("Mixtral", "Mixtral", num_local_experts=4),
    _experts("Qwen3-MoE", "Qwen3Moe", head_dim=8, **_EXPERTS),
    _experts("OLMoE", "Olmoe", num_experts=4, num_experts_per_tok=2),
    _experts("DeepSeek-V3", "DeepseekV3", **_LATENT),
    _model(
        "Mamba",
        "MambaForCausalLM",
        "MambaConfig",
        lambda samples: {"input_ids": (given := tokens(samples, 6)), "labels": given},
        vocab_size=VOCABULARY,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
    ),
    _model("Llama, classifying", "LlamaForSequenceClassification", "LlamaConfig", _sentences, **_DECODER, num_labels=3),
    _encoder("BERT", "Bert"),
    _encoder("RoBERTa", "Roberta"),
    _encoder("ELECTRA", "Electra", embedding_size=32),
    _encoder("ALBERT", "Albert", embedding_size=16),
    _encoder("DeBERTa-v2", "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    _encoder("ModernBERT", "ModernBert", bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2),
    _model(
        "DistilBERT",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        vocab_size=VOCABULARY,
        dim=32,
        hidden_dim=64,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=32,
    ),
    _model(
        "T5",
        "T5ForConditionalGeneration",
        "T5Config",
        _translation,
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    _model("BART", "BartForConditionalGeneration", "BartConfig", _translation, **_BOTH),
    _model("Marian", "MarianMTModel", "MarianConfig", _translation, **_BOTH),
)
QWEN2_MOE = _experts("Qwen2-MoE", "Qwen2Moe", shared_expert_intermediate_size=32, **_EXPERTS)
