"""What models of well-known libraries need before they are recorded."""

import sys
import warnings

from torch import nn


def without_caches(model: nn.Module) -> None:
    """Switches the caches of transformers' models off, as transformers does itself where it checkpoints: what they keep
    is for generation, and they go from layer to layer as one object."""
    library = sys.modules.get("transformers")
    if library is None:
        return
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    cached = [one for one in configs.values() if isinstance(one, library.PreTrainedConfig) and _caches(one)]
    for config in cached:
        config.use_cache = False
    if cached:
        warnings.warn(
            f"{type(model).__name__}: config.use_cache is switched off, as it is for generation", stacklevel=2
        )


def _caches(config: object) -> bool:
    return getattr(config, "use_cache", None) is True
