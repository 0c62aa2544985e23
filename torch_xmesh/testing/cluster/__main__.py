"""Runs a script on an emulated cluster, as torchrun would on a real one: `python -m torch_xmesh.testing.cluster
--help`."""

import argparse
import os
import sys
from collections.abc import Sequence

from . import EmulatedCluster, parse_rate

_INTERRUPTED = 130
_READER_GONE = 141  # as a shell says of SIGPIPE


def _rate_of(text: str) -> tuple[int, str]:
    host, _, rate = text.partition("=")
    if not host.isdigit():
        raise argparse.ArgumentTypeError(f"expected HOST=RATE such as 2=100mbit, got {text!r}")
    return int(host), _rate(rate)


def _rate(text: str) -> str:
    try:
        parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m torch_xmesh.testing.cluster",
        description="Runs a script on emulated hosts (network namespaces with shaped NICs), one process per device, "
        "with torchrun's environment. Without root or iproute2 it runs on plain localhost and says so.",
    )
    parser.add_argument("--hosts", type=int, default=5, help="number of hosts (default %(default)s)")
    parser.add_argument("--devices", type=int, default=4, help="devices (processes) per host (default %(default)s)")
    parser.add_argument(
        "--rate", type=_rate, default="200mbit", help="NIC rate each way, as tc writes it (default %(default)s)"
    )
    parser.add_argument(
        "--rate-of", type=_rate_of, action="append", default=[], metavar="HOST=RATE", help="another rate for one host"
    )
    parser.add_argument(
        "--no-goodput", action="store_true", help="do not measure and print what one TCP stream carries"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- script.py args, or -- -m module args")
    options = parser.parse_args(arguments)
    if options.command and options.command[0] == "--":
        options.command = options.command[1:]
    if not options.command:
        parser.error("expected a script after --")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: that of the rank that failed first, 0 when none did, 130 after
    SIGINT, 141 where what it writes to is closed."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        cluster = EmulatedCluster(
            hosts=options.hosts,
            devices=options.devices,
            rate=options.rate,
            rate_of=dict(options.rate_of),
            output=sys.stdout,
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        print(f"# {cluster.description}", flush=True)
        if not options.no_goodput:
            print(f"# goodput: {cluster.goodput()}", flush=True)
        job = cluster.run(*options.command)
        if job.failed_rank is not None:
            failed = job.failed_rank
            print(
                f"# rank {failed.rank} on host {failed.host} failed first, with exit code {failed.exit_code}",
                file=sys.stderr,
            )
        return job.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader, head say, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE
    finally:
        cluster.close()


if __name__ == "__main__":
    sys.exit(main())
