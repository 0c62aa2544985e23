"""transformers' models of sound and pictures."""

from typing import Any

import torch

from models.libraries.case import VOCABULARY, Batch, LibraryModel, pictures, text, tokens
from models.libraries.language import of_transformers

_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}


def _labelled(samples: int) -> Batch:
    return {**pictures(32)(samples), "labels": torch.randint(0, 4, (samples,))}


def _speech(samples: int) -> Batch:
    return {
        "input_features": torch.randn(samples, 8, 32, dtype=torch.float64),
        "labels": tokens(samples, 8),
    }


def _waves(samples: int) -> Batch:
    waves = torch.randn(samples, 400, dtype=torch.float64)
    return {"input_values": waves, "labels": torch.randint(0, 4, (samples,))}


def _both(samples: int) -> Batch:
    given = text(samples)
    return {"input_ids": given["input_ids"], **pictures(32)(samples)}


def _sorts(name: str, family: str, **options: Any) -> LibraryModel:
    make = of_transformers(f"{family}ForImageClassification", f"{family}Config", **options, num_labels=4)
    return LibraryModel("transformers", name, make, _labelled)


_PART = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_TEXT_PART = {**_PART, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "eos_token_id": 2}
_PICTURE_PART = {**_PART, "image_size": 32, "patch_size": 8}
_TWO = {"text_config": _TEXT_PART, "vision_config": _PICTURE_PART, "projection_dim": 16}

SPEECH_AND_VISION = (
    _sorts("ViT", "ViT", **_VISION),
    _sorts("DeiT", "DeiT", **_VISION),
    _sorts("BEiT", "Beit", **_VISION, drop_path_rate=0.2),
    _sorts("DINOv2", "Dinov2", **_VISION),
    _sorts(
        "Swin",
        "Swin",
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    _sorts("ConvNeXt", "ConvNext", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, drop_path_rate=0.2),
    _sorts(
        "SegFormer",
        "Segformer",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
    ),
    LibraryModel("transformers", "CLIP", of_transformers("CLIPModel", "CLIPConfig", **_TWO), _both),
    LibraryModel(
        "transformers",
        "Whisper",
        of_transformers(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=VOCABULARY,
            d_model=32,
            num_mel_bins=8,
            max_source_positions=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        _speech,
    ),
    LibraryModel(
        "transformers",
        "wav2vec 2.0",
        of_transformers(
            "Wav2Vec2ForSequenceClassification",
            "Wav2Vec2Config",
            num_labels=4,
            **_PART,
            conv_dim=[16, 16],
            conv_stride=[5, 4],
            conv_kernel=[10, 8],
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=4,
            mask_time_prob=0.0,
            layerdrop=0.0,
            num_feat_extract_layers=2,
        ),
        _waves,
    ),
)
