"""What every test shares: the --soak flag, one thread per process, and hypothesis without deadlines or chance."""

from __future__ import annotations

import os
from collections.abc import Iterable

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
