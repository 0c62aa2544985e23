"""torch's own."""

import torch
from torch import nn

from models.libraries.case import Batch, LibraryModel


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)


def _hidden(samples: int) -> Batch:
    return {"src": torch.randn(samples, 16, 64, dtype=torch.float64)}


TRANSFORMER_ENCODER = LibraryModel("torch", "nn.TransformerEncoder", _encoder, _hidden)
