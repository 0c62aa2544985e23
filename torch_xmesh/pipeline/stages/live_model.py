"""What a user does to the model itself after an engine was made of it, where the engine's stages would not notice."""

import weakref
from collections.abc import Collection

from torch import nn

from torch_xmesh.pipeline.capture.hooks import check_no_hook_on_all, has_hooks, hooks_of
from torch_xmesh.pipeline.capture.opened import numbers_of


class LiveModel:
    """The model of which an engine was made, as long as it is there."""

    reaches = "reaches parts of a stage only"
    """What train() and eval() of the model do."""
    hook_advice = "a stage begins inside, so that stages would not notice: register it on the modules inside"

    def __init__(self, model: nn.Module, opened: Collection[str]) -> None:
        """`opened`: the modules that were looked into, of which stages have no copy that the user knows."""
        self._stand_ins: list[tuple[str, nn.Module]] = []
        self._model = weakref.ref(model)
        self._opened = [(name, weakref.ref(model.get_submodule(name))) for name in sorted(opened)]
        self._numbers = self._now()
        self._hooks = {name: hooks_of(module) for name, module in self._there().items()}
        self._training = model.training

    def _there(self) -> dict[str, nn.Module]:
        return {name: module for name, reference in self._opened if (module := reference()) is not None}

    def watch_stand_ins(self, stage: int, module: nn.Module) -> None:
        """Notes those of a stage's modules that are never called: they only hold others under the model's names."""
        stand_ins = [(name, submodule) for name, submodule in module.named_modules() if type(submodule) is nn.Module]
        self._stand_ins += [(f"{name!r} of stage {stage}", submodule) for name, submodule in stand_ins]

    def _now(self) -> dict[str, float]:
        return numbers_of(self._there())

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
            raise ValueError(f"{called} was called on the model, which {self.reaches}: call engine.{called}")
        self._check_hooks(model)
        now = self._now()
        for name, value in self._numbers.items():
            if now.get(name, value) != value:
                raise ValueError(
                    f"{name} is {now[name]}; it was {value} when the engine was made, and is part of what was "
                    "recorded: make it a buffer or an argument, or make a new engine"
                )

    def _check_hooks(self, model: nn.Module) -> None:
        for name, module in self._there().items():
            if hooks_of(module) != self._hooks[name]:
                where = f"module {name!r}" if name else "the model"
                raise ValueError(
                    f"{where} has a hook since the engine was made, or has it no more, and {self.hook_advice}"
                )
        for where, submodule in self._stand_ins:
            if has_hooks(submodule):
                raise ValueError(f"module {where} has a hook, but is never called: it only holds others")
        self._check_parameters(model)
        check_no_hook_on_all()

    def _check_parameters(self, model: nn.Module) -> None:
        """Raises ValueError for a hook on a parameter that is none of the stages'."""
