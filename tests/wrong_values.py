"""What a caller may give by mistake, for tests of what functions say to it."""

from __future__ import annotations

from typing import Any

WRONG: list[Any] = [
    None,
    "",
    "nowhere",
    b"x",
    -1,
    0,
    2.5,
    float("nan"),
    10**30,
    [],
    [None],
    {},
    {"a": 1},
    object(),
    int,
]
