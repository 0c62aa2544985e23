"""The program: reads the arguments, then runs a module of ``torch_xmesh.cli``."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xmesh_cli.commands import add_calibrate, add_parallelize, add_plan, add_schedule

_READER_GONE = 141  # as a shell says of SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 2 for a user's mistake, 141 where what it writes to is closed."""
    options = parser().parse_args(arguments)
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        importlib.import_module(options.module).run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, head say, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE
    except OSError as error:
        print(f"error: {_argument_of(error.filename, options)}{error}", file=sys.stderr)
        return 2
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _argument_of(path: object, options: argparse.Namespace) -> str:
    """The argument that names this path, as a prefix of what is wrong with it."""
    names = [name for name, value in vars(options).items() if path and isinstance(value, str | Path)]
    named = next((name for name in names if Path(getattr(options, name)) == Path(str(path))), None)
    return "" if named is None else f"--{named.replace('_', '-')}: "


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; each names its module as ``module``."""
    out = argparse.ArgumentParser(
        prog="xmesh", description="Plans, schedules and measurements for training on several device meshes."
    )
    out.add_argument("--version", action=_Version, help="that of torch_xmesh, and of the torch beside it")
    commands = out.add_subparsers(required=True, metavar="command")
    for add in (add_plan, add_calibrate, add_schedule, add_parallelize):
        add(commands)
    return out


class _Version(argparse.Action):
    def __init__(self, **given: Any) -> None:
        super().__init__(nargs=0, **given)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import torch

        import torch_xmesh

        print(f"torch_xmesh {torch_xmesh.__version__} (torch {torch.__version__})")
        parser.exit()
