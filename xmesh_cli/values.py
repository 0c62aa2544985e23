"""Numbers with units, as arguments. Each reader raises argparse.ArgumentTypeError, which names the argument."""

import argparse
import re

_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}


def num_bytes(text: str) -> int:
    """Reads ``64MiB``, ``1.5GB``, ``4096``."""
    return round(_scaled(text, r"b?", _BYTES, "a number of bytes such as 64MiB"))


def positive_bytes(text: str) -> int:
    """As :func:`num_bytes`, of one byte at least."""
    expected = "a positive number of bytes such as 64MiB"
    value = round(_scaled(text, r"b?", _BYTES, expected))
    if value == 0:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


def bits_per_second(text: str) -> float:
    """Reads ``25gbit`` (per second), as bytes per second."""
    return _rate(text, r"bits?(?:/s)?", _DECIMAL, "a rate such as 25gbit") / 8


def bytes_per_second(text: str) -> float:
    """Reads ``2TB/s``, ``900GB``, ``2e12``."""
    return _rate(text, r"(?:b?(?:/s)?)", _BYTES, "bytes per second such as 2TB/s")


def flops(text: str) -> float:
    """Reads ``312T``, ``312TFLOPS``, ``3.12e14``: operations per second."""
    return _rate(text, r"(?:flop)?(?:/?s)?", _DECIMAL, "operations per second such as 312TFLOPS")


def milliseconds(text: str) -> float:
    """Reads a positive number of milliseconds."""
    return _positive(text, "a positive number of milliseconds")


def seconds(text: str) -> float:
    """Reads a positive number of seconds."""
    return _positive(text, "a positive number of seconds")


def count(text: str) -> int:
    """Reads a positive integer."""
    if not text.strip().isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def _positive(text: str, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


def _rate(text: str, unit: str, scales: dict[str, int], expected: str) -> float:
    value = _scaled(text, unit, scales, expected)
    if value == 0:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


def _scaled(text: str, unit: str, scales: dict[str, int], expected: str) -> float:
    match = re.fullmatch(rf"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([kmgtp]i?)?{unit}\s*", text.lower())
    if match is None or (match[2] or "") not in scales:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    value = float(match[1]) * scales[match[2] or ""]
    if value == float("inf"):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value
