"""PyTorch's own DistributedTest suite on plain gloo and on xmesh, and the difference between the sets of passing tests.

    python tests/peer_suite.py --short              a dozen tests, under a minute
    python tests/peer_suite.py --all --json out     everything, about 20 minutes
    python tests/peer_suite.py --tests a,b          these

Every test runs twice on three processes: as it is, with gloo, and with the name "gloo" that it hands to
init_process_group or new_group replaced by "xmesh". A test that passes on gloo alone counts as different, unless its
source asks for a backend by name (isinstance of ProcessGroupGloo, get_backend() == "gloo", monitored_barrier, which
torch allows on the name gloo only): those are listed apart. Exits 1 when a test is different.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import multiprocessing
import os
import re
import sys
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("WORLD_SIZE", "3")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "90")
LOG = Path(tempfile.gettempdir()) / "xmesh_peer_suite.log"
HERE = str(Path(__file__).resolve().parent)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend  # noqa: E402

import torch_xmesh  # noqa: E402, F401

SHORT = [
    "test_all_reduce_sum",
    "test_all_gather",
    "test_all_to_all_single_unequal_split",
    "test_barrier_group",
    "test_broadcast_full_group",
    "test_send_recv_any_source",
    "test_isend",
    "test_gather_object",
    "test_scatter_full_group",
    "test_DistributedDataParallelCPU",
    "test_new_subgroups_by_enumeration",
    "test_reduce_min",
]
ASKS_BY_NAME = re.compile(r"ProcessGroupGloo|get_backend|backend_name|monitored_barrier|Backend\.GLOO|== ?\"gloo\"")


def _use_xmesh() -> None:
    """In a rank: the name "gloo" means xmesh in the two calls that take a backend's name."""
    for name in ("init_process_group", "new_group"):
        original = getattr(c10d, name)

        def mapped(*args: Any, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            args = tuple("xmesh" if arg == "gloo" else arg for arg in args)
            if kwargs.get("backend") == "gloo":
                kwargs["backend"] = "xmesh"
            return _original(*args, **kwargs)

        setattr(c10d, name, mapped)
        setattr(dist, name, mapped)


def _rank(on_xmesh: bool, environment: dict[str, str], *args: Any, **kwargs: Any) -> None:
    os.environ.update(environment)
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if on_xmesh:
        _use_xmesh()
    run: Any = PeerTest._run
    run(*args, **kwargs)


class PeerTest(TestDistBackend, DistributedTest._DistTestBase):
    """The suite, on ranks forked from a server that has imported torch."""

    on_xmesh = False

    def setUp(self) -> None:
        super().setUp()  # type: ignore[no-untyped-call]
        self._spawn_processes()

    def _spawn_processes(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["peer_suite", "torch._dynamo"])

        def process(target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return context.Process(
                target=_rank, name=name, args=(self.on_xmesh, dict(os.environ), *args), kwargs=kwargs
            )

        self._start_processes(process)


def run_test(name: str, on_xmesh: bool) -> tuple[str, str]:
    """Runs one test; returns "passed", "skipped" or "failed", and the reason's last line."""
    test: Any = PeerTest(name)
    test.on_xmesh = on_xmesh
    result = unittest.TestResult()
    test.run(result)
    for process in getattr(test, "processes", []):
        process.kill()
        process.join()
    if result.skipped:
        return "skipped", result.skipped[0][1]
    bad = result.failures + result.errors
    if bad:
        lines = [line for line in bad[0][1].splitlines() if re.match(r"[\w.]*(Error|Exception|Timeout)\b", line)]
        return "failed", (lines or bad[0][1].strip().splitlines())[-1][:300]
    return "passed", ""


def compare(names: list[str]) -> dict[str, Any]:
    """Runs the tests on both and returns the record that the summary is made of."""
    found: dict[str, dict[str, tuple[str, str]]] = {"gloo": {}, "xmesh": {}}
    for index, name in enumerate(names):
        for backend in ("gloo", "xmesh"):
            found[backend][name] = run_test(name, backend == "xmesh")
        print(f"[{index + 1}/{len(names)}] {name}: " + ", ".join(f"{b} {found[b][name][0]}" for b in found), flush=True)
    only_gloo = [n for n in names if found["gloo"][n][0] == "passed" and found["xmesh"][n][0] != "passed"]
    by_name = [n for n in only_gloo if ASKS_BY_NAME.search(inspect.getsource(getattr(PeerTest, n)))]
    return {
        "torch": torch.__version__,
        "tests": len(names),
        **{b: {s: sum(v[0] == s for v in found[b].values()) for s in ("passed", "skipped", "failed")} for b in found},
        "only_gloo": {n: found["xmesh"][n][1] for n in only_gloo if n not in by_name},
        "only_gloo_asks_by_name": {n: found["xmesh"][n][1] for n in by_name},
        "only_xmesh": [n for n in names if found["xmesh"][n][0] == "passed" and found["gloo"][n][0] != "passed"],
        "failed_on_gloo": {n: found["gloo"][n][1] for n in names if found["gloo"][n][0] == "failed"},
    }


def all_tests() -> list[str]:
    return sorted(name for name in dir(PeerTest) if name.startswith("test_"))


def summary(record: dict[str, Any]) -> str:
    return (
        f"DistributedTest (torch {record['torch']}): {record['tests']} tests; gloo passes {record['gloo']['passed']}, "
        f"xmesh {record['xmesh']['passed']}; only on gloo: {len(record['only_gloo'])}, "
        f"and {len(record['only_gloo_asks_by_name'])} that ask for a backend by name"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--short", action="store_true")
    chosen.add_argument("--all", action="store_true")
    chosen.add_argument("--tests", help="names, separated by commas")
    parser.add_argument("--json", help="write the record here")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    names = all_tests() if options.all else SHORT if options.short else options.tests.split(",")
    record = compare(names)
    if options.json:
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    for name, reason in {**record["only_gloo"], **record["only_gloo_asks_by_name"]}.items():
        print(f"only on gloo: {name}: {reason}")
    print(summary(record))
    return 1 if record["only_gloo"] or not record["gloo"]["passed"] else 0


if __name__ == "__main__":
    # Ranks import this file by its name, from the server that has it already.
    os.environ["PYTHONPATH"] = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    import peer_suite

    sys.exit(peer_suite.main())
