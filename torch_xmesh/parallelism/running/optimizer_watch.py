"""Whether an optimizer steps the parameters that a planned engine trains, or others that nobody uses."""

import warnings
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook


def warn_of_own_parameters() -> None:
    """The model that a user gave is not what is trained."""
    warnings.warn(
        "with a plan the engine trains parameters of its own, parts of the model's: the model that was given keeps its "
        "initial values. Make the optimizer of engine.parameters(); engine.state_dict() has the trained values",
        stacklevel=2,
    )


class OptimizerWatch:
    """Looks at the optimizers that step between an engine's steps, as long as it is there. Threading: the caller's."""

    def __init__(self, parameters: Collection[nn.Parameter]) -> None:
        self._own = set(map(id, parameters))
        self._has_own = self._has_others = self._has_begun = self._has_warned = False
        reference = weakref.ref(self)

        def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            watch = reference()
            if watch is not None:
                watch._note(optimizer)

        handle = register_optimizer_step_post_hook(stepped)
        weakref.finalize(self, handle.remove)

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        is_own = any(id(parameter) in self._own for group in optimizer.param_groups for parameter in group["params"])
        self._has_own, self._has_others = self._has_own or is_own, self._has_others or not is_own

    def begin_step(self) -> None:
        """A training step begins: says so, once, where optimizers have stepped since the last one and none of them has
        used its gradients."""
        if self._has_begun and self._own and self._has_others and not self._has_own and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "an optimizer has stepped since the last training step, but none of the parameters that this engine "
                "trains: its gradients were not used. Make the optimizer of engine.parameters(), not of the model's",
                stacklevel=2,
            )
        self._has_begun, self._has_own, self._has_others = True, False, False
