"""Models of transformers, timm, torchvision, diffusers and torch, with random weights and mostly tiny, trained by their
own loss or the mean square of what they return. :data:`MODELS` has them by name.

A library is imported once one of its models is built.
"""

from models.libraries.case import Batch, LibraryModel, loss_of, without_chance
from models.libraries.diffusers_models import DIFFUSERS
from models.libraries.language import LANGUAGE, QWEN2_MOE
from models.libraries.speech_and_vision import SPEECH_AND_VISION
from models.libraries.torch_models import TRANSFORMER_ENCODER
from models.libraries.vision_models import RESNET_50, TIMM, TORCHVISION

_SWEPT = (*LANGUAGE, *SPEECH_AND_VISION, *TIMM, *TORCHVISION, *DIFFUSERS)
_ALL = (*_SWEPT, QWEN2_MOE, RESNET_50, TRANSFORMER_ENCODER)
MODELS: dict[str, LibraryModel] = {model.name: model for model in _ALL}
assert len(MODELS) == len(_ALL), "models have names of their own"
SWEPT = tuple(model.name for model in _SWEPT)
"""Those that tests/parallelism/library_sweep.json has outcomes of."""

__all__ = ["MODELS", "SWEPT", "Batch", "LibraryModel", "loss_of", "without_chance"]
