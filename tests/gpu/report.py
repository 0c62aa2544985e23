"""How a step tells the program what it found: lines of JSON on its standard output."""

from __future__ import annotations

import json
from typing import Any

PREFIX = "@found "


def found(text: str, **figures: Any) -> None:
    """Says it at once; `figures` are kept beside the text."""
    print(PREFIX + json.dumps({"text": text, **figures}), flush=True)
