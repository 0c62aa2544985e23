"""The steps of the program, and what runs one of them: ``python tests/gpu/steps.py STEP DEVICE``."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Step:
    """`module` has ``run(device) -> bool``, whether all is well. Without a device it is imported, and its
    ``prepare()``, if it has one, sets up more."""

    name: str
    what: str
    limit_s: float
    module: str
    needs_device: bool = True


STEPS = [
    Step("build", "the extension, in place", 300, "check_build", needs_device=False),
    Step("machine", "what is here", 40, "check_machine", needs_device=False),
    Step("groups", "messages of one NCCL group that wait for each other, in torch alone", 90, "check_nccl_groups"),
    Step("one-rank", "collectives, reshards, gradients and kernels' bits against cpu, one rank", 60, "check_one_rank"),
    Step("two-ranks", "the same with two ranks", 70, "check_two_ranks"),
    Step("layouts", "random layouts with every strategy, four ranks", 80, "check_layouts"),
    Step("faults", "ranks that are killed or stopped: survivors raise, live on, reshard again", 130, "check_faults"),
    Step("aborts", "twenty communicators that are aborted under load", 75, "check_aborts"),
    Step("waits", "graph capture beside a reshard, blocking waits, what a communicator costs", 60, "check_waits"),
    Step("backward", "the split backward against one whole backward, to the bit", 60, "check_backward"),
    Step("pipelines", "pipelines and plans of two ranks against one process; I and W", 120, "check_pipelines"),
    Step("four-ranks", "the same with four ranks", 90, "check_four_ranks"),
    Step("quickstart", "the example, with eight ranks", 60, "check_quickstart"),
    Step("speed", "the kernels beside torch's copy, reshards beside NCCL's sends", 75, "check_speed"),
]


def main() -> int:
    name, device = sys.argv[1:]
    for folder in ("gpu", "", "distributed", "device", "device/emu", "parallelism"):
        sys.path.insert(0, str(ROOT / "tests" / folder))
    sys.path.insert(0, str(ROOT))
    step = next(step for step in STEPS if step.name == name)
    check = importlib.import_module(step.module)
    if device == "none" and step.needs_device:
        getattr(check, "prepare", lambda: None)()
        return 0
    return 0 if check.run(device) else 1


if __name__ == "__main__":
    sys.exit(main())
