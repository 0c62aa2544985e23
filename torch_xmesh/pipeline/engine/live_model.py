"""What a user does to the model itself after an engine was made of it, where the engine's stages would not notice."""

import weakref
from collections.abc import Collection

from torch import nn

from torch_xmesh.pipeline.capture.opened import has_hooks, numbers_of


class LiveModel:
    """The model that a user has cut, as long as it is there."""

    def __init__(self, model: nn.Module, opened: Collection[str]) -> None:
        """`opened`: the modules that were looked into, of which stages have no copy that the user knows."""
        self._model = weakref.ref(model)
        self._opened = [(name, weakref.ref(model.get_submodule(name))) for name in sorted(opened)]
        self._numbers = self._now()
        self._training = model.training

    def _now(self) -> dict[str, float]:
        there = {name: module for name, reference in self._opened if (module := reference()) is not None}
        return numbers_of(there)

    def told(self) -> None:
        """The engine has been told of a mode, whatever that of the model is."""
        model = self._model()
        self._training = self._training if model is None else model.training

    def check(self) -> None:
        """Raises ValueError for a change that the stages would not know of."""
        model = self._model()
        if model is None:
            return
        if model.training != self._training:
            called = "train()" if model.training else "eval()"
            raise ValueError(
                f"{called} was called on the model, which reaches parts of a stage only: call engine.{called}"
            )
        for name, reference in self._opened:
            module = reference()
            if module is not None and has_hooks(module):
                where = f"module {name!r}" if name else "the model"
                raise ValueError(
                    f"{where} has a hook since the engine was made, and a stage begins inside, so that it would never "
                    "run: register it on the modules inside"
                )
        now = self._now()
        for name, value in self._numbers.items():
            if now.get(name, value) != value:
                raise ValueError(
                    f"{name} is {now[name]}; it was {value} when the engine was made, and is part of what was "
                    "recorded: make it a buffer or an argument, or make a new engine"
                )
