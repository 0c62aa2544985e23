"""What a user does to a model that runs by a plan."""

from torch import nn

from torch_xmesh.pipeline.capture.hooks import has_gradient_hooks
from torch_xmesh.pipeline.stages.live_model import LiveModel


class PlannedModel(LiveModel):
    """A model of which a plan's stages were made: they have parameters of their own, and run it as it was then."""

    reaches = "has nothing to do with the engine's stages"
    hook_advice = "a plan has it as it was then, so that stages would not notice: make a new engine"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, [name for name, _ in model.named_modules()])

    def _check_parameters(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if has_gradient_hooks(parameter):
                raise ValueError(f"parameter {name} has a hook: with a plan stages have parameters of their own")
