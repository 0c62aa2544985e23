"""Models of diffusers, which take noisy pictures and a time step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from models.libraries.case import Batch, LibraryModel


def _of_diffusers(kind: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import diffusers

        made: nn.Module = getattr(diffusers, kind)(**options)
        return made

    return make


def _model(name: str, kind: str, batch: Callable[[int], Batch], **options: Any) -> LibraryModel:
    return LibraryModel("diffusers", name, _of_diffusers(kind, options), batch)


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _timed(channels: int, argument: str = "sample", **more: tuple[int, ...]) -> Callable[[int], Batch]:
    """Pictures, time steps of the samples, and more values of the shapes given, [samples, *shape]."""

    def batch(samples: int) -> Batch:
        return {
            argument: _noise(samples, channels, 16, 16),
            "timestep": torch.randint(0, 1000, (samples,)),
            **{name: _noise(samples, *shape) for name, shape in more.items()},
        }

    return batch


def _classes(samples: int) -> Batch:
    return {
        "hidden_states": _noise(samples, 4, 16, 16),
        "timestep": torch.randint(0, 1000, (samples,)),
        "class_labels": torch.randint(0, 8, (samples,)),
    }


_BLOCKS = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 16}
_DIT = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "sample_size": 16, "patch_size": 2}

DIFFUSERS = (
    _model(
        "UNet2DModel",
        "UNet2DModel",
        _timed(3),
        **_BLOCKS,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    _model(
        "UNet2DConditionModel",
        "UNet2DConditionModel",
        _timed(4, encoder_hidden_states=(6, 32)),
        **_BLOCKS,
        cross_attention_dim=32,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ),
    _model("DiT", "DiTTransformer2DModel", _classes, **_DIT, in_channels=4, num_embeds_ada_norm=8, norm_num_groups=4),
    _model(
        "Stable Diffusion 3",
        "SD3Transformer2DModel",
        _timed(4, "hidden_states", encoder_hidden_states=(6, 16), pooled_projections=(16,)),
        **_DIT,
        in_channels=4,
        out_channels=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        pos_embed_max_size=16,
    ),
    _model(
        "AutoencoderKL",
        "AutoencoderKL",
        lambda samples: {"sample": _noise(samples, 3, 16, 16)},
        **_BLOCKS,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        latent_channels=4,
    ),
)
