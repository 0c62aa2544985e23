"""How a loss function is called."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


@functools.lru_cache(maxsize=64)
def needs_target(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss function cannot be called with the model's output alone."""
    try:
        inspect.signature(loss_fn).bind(None)
    except TypeError:
        return True
    except ValueError:  # no signature is known
        return True
    return False


def loss_of(loss_fn: Callable[..., Any], output: Any, target: Any) -> Any:
    """The loss; without a target, of the model's output alone where that will do."""
    return loss_fn(output) if target is None and not needs_target(loss_fn) else loss_fn(output, target)
