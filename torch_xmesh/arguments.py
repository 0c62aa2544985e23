"""Checks of what public functions are given. Each raises ValueError with the argument's name, what it must be, and what
came."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from torch import nn

T = TypeVar("T")
MOST = (1 << 63) - 1
"""The largest integer that the C++ rooms take."""
MOST_STAGES = 1 << 12
MOST_LAYERS = 1 << 16
MOST_MICROBATCHES = 1 << 16


def shown(value: object) -> str:
    """A wrong value for a message, with its type; long ones are cut."""
    text = repr(value)
    return f"{text if len(text) <= 200 else text[:200] + '...'} ({type(value).__name__})"


def instance_of(name: str, value: object, kind: type[T], what: str) -> T:
    """`value`, which must be of the kind; `what` is its name for people, with its article."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {what}, got {shown(value)}")
    return value


def no_inference_tensors(model: nn.Module) -> None:
    """Autograd records nothing of tensors that were made in inference mode."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            raise ValueError(
                f"{name} was made in torch.inference_mode(), which autograd cannot record: make the model outside "
                "(torch.no_grad() will do), or clone its tensors there"
            )


def flag(name: str, value: object) -> bool:
    """`value`, True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {shown(value)}")
    return value


def positive_int(name: str, value: object, most: int = MOST) -> int:
    """`value`, from 1 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive int, got {value!r}")
    if value > most:
        raise ValueError(f"{name} is at most {most}, got {value}")
    return value


def int_list(name: str, value: object) -> list[int]:
    """`value`, a sequence of integers that are not negative."""
    listed = list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [None]
    if not all(isinstance(item, int) and 0 <= item <= MOST for item in listed):
        raise ValueError(f"{name} must be a list of ints that are not negative, got {shown(value)}")
    return listed


def memory_limit(value: object) -> int | None:
    """`value`, bytes or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        raise ValueError(f"memory_limit_bytes is a positive int or None, got {shown(value)}")
    return value


def read_text(path: object, what: str) -> str:
    """The text of a file; `what` it should hold.

    Raises:
        ValueError: the path is none, or the file is no text.
        OSError: it cannot be read.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"{what} is read from a path, got {shown(path)}")
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text, expected {what} as text") from None
