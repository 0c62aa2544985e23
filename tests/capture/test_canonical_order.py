"""The order of recordings: that in which a model runs, loops over sets apart, which are alike in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import cases
from recorded_cases import record_opened
from set_order_models import KINDS, LoopsOverSets, RotaryModel
from torch import fx

from torch_xmesh.pipeline.capture import canonical

BASE = Path(__file__).parent


@pytest.mark.parametrize("case", [one for one in cases() if one.name != "hooks"], ids=lambda case: case.name)
def test_what_loops_over_no_set_stays_in_its_order(case: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and order are those in which the graph was written."""
    before: list[list[tuple[str, str]]] = []
    made = canonical.make_canonical

    def watched(graph: fx.Graph, *rest: object) -> object:
        before.append([(node.name, str(node.target)) for node in graph.nodes if node.op != "get_attr"])
        constants = made(graph, *rest)  # type: ignore[arg-type]
        assert [(node.name, str(node.target)) for node in graph.nodes if node.op != "get_attr"] == before[-1]
        return constants

    monkeypatch.setattr("torch_xmesh.pipeline.capture.recorder.make_canonical", watched)
    model = case.build()  # type: ignore[attr-defined]
    args, kwargs, _ = case.batch(4)  # type: ignore[attr-defined]
    record_opened(model, args, kwargs)
    assert before


def lines_here() -> list[list[str]]:
    """What is recorded in this process of the models that loop over sets."""
    x, mask = torch.ones(2, 5, 4), torch.ones(2, 5)
    loops = record_opened(LoopsOverSets(), (x,))
    kinds = record_opened(RotaryModel(KINDS), (x, mask))
    return [loops.lines, kinds.lines, [loops.way], [kinds.way]]


@pytest.mark.in_turn(3)
def test_loops_over_sets_are_alike_in_every_process() -> None:
    """In processes of eight hash seeds, in which the sets have at least three orders."""
    script = "import json, test_canonical_order as t; print(json.dumps([t.lines_here(), list(set(t.KINDS))]))"
    path = os.pathsep.join([str(BASE), str(BASE.parent), str(BASE.parents[1]), os.environ.get("PYTHONPATH", "")])
    found = []
    for seed in range(8):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        found.append(json.loads(done.stdout))
    assert len({tuple(order) for _, order in found}) >= 3
    assert all(lines == found[0][0] for lines, _ in found)
    assert all(len(lines) > 20 for lines in found[0][0][:2])
