"""What models of well-known libraries need to be trained in stages."""

import sys
import warnings
from collections.abc import Callable

from torch import nn


def without_caches(model: nn.Module) -> None:
    """Switches the caches of transformers' models off: what they keep is for generation, and they go from layer to
    layer as one object. Also in the config, which modules that stay whole look at."""
    library = sys.modules.get("transformers")
    if library is None:
        return
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    cached = [
        settings
        for settings in configs.values()
        if isinstance(settings, library.PreTrainedConfig) and _caches(settings)
    ]
    for config in cached:
        config.use_cache = False
    if cached:
        warnings.warn(
            f"{type(model).__name__}: config.use_cache is switched off, as it is for generation (docs/models.md)",
            stacklevel=2,
        )


def own_init_fn(model: object) -> Callable[[nn.Module], object] | None:
    """How a transformers model initializes a module of its own, buffers that no checkpoint has among them; None for
    other models."""
    library = sys.modules.get("transformers")
    modules = model.modules() if library is not None and isinstance(model, nn.Module) else ()
    found = next((candidate for candidate in modules if isinstance(candidate, library.PreTrainedModel)), None)  # type: ignore[union-attr]
    init_fn: Callable[[nn.Module], object] | None = getattr(found, "_init_weights", None)
    return init_fn


def _caches(config: object) -> bool:
    return getattr(config, "use_cache", None) is True
