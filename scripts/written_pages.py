"""What scripts have in common that write tables into pages: to write a page, or to check it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def write_or_check(page: Path, text: Callable[[], str], description: str | None) -> int:
    """The exit status: with --check 1 where the page says something else, and nothing is written."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args().check:
        return int(page.read_text() != text())
    page.write_text(text())
    return 0
