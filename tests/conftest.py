"""What every test shares: the --soak flag, one thread per process, hypothesis without deadlines or chance, and that
plans are what they are once saved and read."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from typing import Any

import pytest

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


def pytest_collection_modifyitems(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    if config.getoption("--soak"):
        return
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="a long test: runs on any machine with --soak"))


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

    for module in ("plan_parallel", "presets"):
        monkeypatch.setattr(importlib.import_module(f"torch_xmesh.parallelism.{module}"), "assembled", watched)
