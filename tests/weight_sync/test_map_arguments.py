"""Whatever a person passes, what is wrong is a ValueError, at once or once the map is resolved."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from wrong_values import WRONG

from torch_xmesh.weight_sync import (
    Catalog,
    Expression,
    Manifest,
    Region,
    apply_map,
    concat,
    rename,
    resolve,
    stack,
    take,
)
from torch_xmesh.weight_sync.hugging_face import ReplicaRank, fused_map

SOURCES = {"w": torch.zeros(4, 6)}
CATALOG = Catalog.of(SOURCES)
TARGET = torch.zeros(4, 6)


def hook(received: torch.Tensor, into: torch.Tensor, box: object) -> None:
    into.copy_(received)


def region(**arguments: Any) -> None:
    resolve({"w": TARGET}, {"w": Region(**arguments)}, CATALOG)


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "take": (take, {"name": "w"}),
    "concat": (concat, {"parts": ["w"], "dim": 0}),
    "stack": (stack, {"parts": ["w"], "dim": 0}),
    "rename": (rename, {"rules": {"a": "b"}}),
    "Region": (
        region,
        {"source": "w", "box": None, "into": TARGET, "dtype": torch.float32, "hook": hook, "block": (1, 1)},
    ),
    "resolve": (resolve, {"targets": SOURCES, "mapping": {}, "catalog": CATALOG, "renaming": None}),
    "Manifest.of": (Manifest.of, {"weights": SOURCES}),
    "Manifest.from_json": (Manifest.from_json, {"text": Manifest.of(SOURCES).to_json()}),
    "Catalog.merge": (Catalog.merge, {"manifests": {0: Manifest.of(SOURCES)}}),
    "ReplicaRank": (ReplicaRank, {"tp_rank": 0, "tp_size": 1, "ep_rank": 0, "ep_size": 1}),
    "fused_map": (fused_map, {"catalog": CATALOG, "rank": ReplicaRank(), "vocab_multiple": 1}),
    "apply_map": (apply_map, {"sources": SOURCES, "resolved": resolve({"w": TARGET}, {}, CATALOG)}),
    "narrow": (take("w").narrow, {"dim": 0, "begin": 0, "end": 4}),
    "rows": (take("w").rows, {"begin": 0, "end": 4}),
    "select": (take("w").select, {"dim": 0, "index": 0}),
    "shard": (take("w").shard, {"dim": 0, "index": 0, "count": 1}),
    "heads": (take("w").heads, {"dim": 0, "index": 0, "count": 1, "num_heads": 2}),
    "transpose": (take("w").transpose, {"dim0": 0, "dim1": 0}),
    "pad": (take("w").pad, {"dim": 0, "to": 4, "value": 0}),
    "cast": (take("w").cast, {"dtype": torch.float32}),
    "through": (take("w").through, {"hook": hook, "block": (1, 1)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_parameter(name: str) -> None:
    call, right = CALLS[name]
    assert set(right) <= set(inspect.signature(call).parameters) or call is region
    made = call(**right)
    target = torch.zeros(made.layout(lambda _: (4, 6)).shape) if isinstance(made, Expression) else TARGET
    run(call, right, target)
    for parameter in right:
        for wrong in WRONG:
            try:
                run(call, {**right, parameter: wrong}, target)
            except Exception as error:
                if not isinstance(error, ValueError) or not str(error):
                    pytest.fail(f"{name}({parameter}={wrong!r}) raised {error!r}")


def run(call: Callable[..., Any], arguments: dict[str, Any], target: torch.Tensor) -> None:
    """Calls it, and uses what it makes."""
    made = call(**arguments)
    if isinstance(made, Expression):
        resolve({"w": target}, {"w": made}, CATALOG)
    elif call is rename:
        made("a")
