"""Models of transformers, timm, torchvision and diffusers: tiny, with random weights, trained by their own loss or the
mean square of what they return. :data:`MODELS` has them by library and name.

A library is imported once one of its models is built.
"""

from models.libraries.case import Batch, LibraryModel, loss_of, without_chance
from models.libraries.diffusers_models import DIFFUSERS
from models.libraries.language import LANGUAGE
from models.libraries.speech_and_vision import SPEECH_AND_VISION
from models.libraries.vision_models import TIMM, TORCHVISION

_ALL = (*LANGUAGE, *SPEECH_AND_VISION, *TIMM, *TORCHVISION, *DIFFUSERS)
MODELS: dict[str, LibraryModel] = {model.name: model for model in _ALL}
assert len(MODELS) == len(_ALL), "models have names of their own"

__all__ = ["MODELS", "Batch", "LibraryModel", "loss_of", "without_chance"]
