"""What every test shares: the --soak flag, tests that take turns, one thread per process, hypothesis without deadlines
or chance, and that plans are what they are once saved and read."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from typing import Any

import pytest
from turns import part_of_commit

os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    from hypothesis import settings
except ImportError:
    pass
else:
    settings.register_profile("repeatable", deadline=None, derandomize=True)
    settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the long tests too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "soak: a long test, run with --soak only")
    config.addinivalue_line("markers", "in_turn(parts): one part of its cases per commit, all with --soak")


def pytest_collection_modifyitems(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    if config.getoption("--soak"):
        return
    seen: dict[str, int] = {}
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="a long test: runs on any machine with --soak"))
        if turn := item.get_closest_marker("in_turn"):
            (parts,) = turn.args
            test = item.nodeid.partition("[")[0]
            case = seen[test] = seen.get(test, -1) + 1
            if case % parts != part_of_commit(parts, test):
                item.add_marker(pytest.mark.skip(reason="another commit's turn: runs on any machine with --soak"))


@pytest.fixture(autouse=True)
def _plans_are_read_as_they_were_saved(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that tests of plans make in their own process."""
    if request.path.parent.name != "parallelism":
        return
    from torch_xmesh.parallelism.assembly import assembled as made
    from torch_xmesh.parallelism.plan import ParallelPlan

    def watched(*given: Any) -> ParallelPlan:
        plan = made(*given)
        assert ParallelPlan.from_json(plan.to_json()) == plan
        return plan

    # not by its path in a text: the package has a function of the module's name
    monkeypatch.setattr(importlib.import_module("torch_xmesh.parallelism.plan_parallel"), "assembled", watched)
