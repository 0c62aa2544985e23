"""Measures xm.split_backward on one process: python benchmarks/split_perf.py [--json split.json]

Family `models`: input gradients (I) and weight gradients (W) against one whole backward and against torch's own split
in Python (torch.distributed.pipelining._backward). Family `chains`: the same on layers so small that overhead is all.
Family `walk`: chains of operations without weights, split_backward against torch.autograd.grad; the difference per node
is what the walk over the graph, a hook per node that frees what it saved, the engine's bookkeeping for a kept graph and
freeing all that take. Family `memory`: bytes of tensors alive. README.md beside this file defines all figures.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from parts.shared.harness import exit_code, machine_notes, save, wrong_note
from parts.shared.progress import Progress
from parts.shared.table import LiveTable, say
from parts.split.measure import follow_memory, time_backwards
from parts.split.models import FULL, GRAD, MODELS, OURS, OURS_FIRST, TORCH, Method, Model, doublings, tiny_chain
from parts.split.records import (
    CHAIN_HEAD,
    MEMORY_HEAD,
    MODEL_HEAD,
    WALK_HEAD,
    MemoryRecord,
    TimeRecord,
    bar_lines,
    chain_row,
    error_lines,
    memory_row,
    model_row,
    walk_row,
)

_Head = list[tuple[str, str]]
_Row = Callable[[TimeRecord], list[str]]
_METHODS = (FULL, OURS, TORCH)
_SHORT_RUNS = 10
"""Runs of a small model for each of a large one."""


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in MODELS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(MODELS)}")
    return names


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",") if part]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=_names, default=list(MODELS), help=f"default: {','.join(MODELS)}")
    parser.add_argument("--runs", type=_count, default=15, help="of each method; small models: ten times as many")
    parser.add_argument("--layers", type=_counts, default=[16, 64, 256], help="of the chains (default 16,64,256)")
    parser.add_argument("--nodes", type=_counts, default=[1000, 4000], help="of the walks (default 1000,4000)")
    parser.add_argument("--json", type=Path, help="write the records here")
    return parser.parse_args(arguments)


def _table(title: str, head: _Head) -> LiveTable:
    live = LiveTable(head, [list(MODELS), [method.name for method in _METHODS]])
    live.begin([title])
    return live


def measure_times(options: argparse.Namespace, progress: Progress) -> list[TimeRecord]:
    """Families `models`, `chains` and `walk`."""
    short = options.runs * _SHORT_RUNS
    families: list[tuple[str, _Head, _Row, Sequence[Method], Sequence[Callable[[], Model]], int]] = [
        ("models", MODEL_HEAD, model_row, _METHODS, [MODELS[name] for name in options.models], options.runs),
        ("chains", CHAIN_HEAD, chain_row, _METHODS, [partial(tiny_chain, n) for n in options.layers], short),
        ("walk", WALK_HEAD, walk_row, (GRAD, OURS_FIRST), [partial(doublings, n) for n in options.nodes], short),
    ]
    every = []
    for family, head, row, methods, makers, runs in families:
        live = _table(f"{family}: the least of {runs} runs of each method, which take turns", head)
        for make in makers:
            model = make()
            progress.say(f"{family}: {model.name}")
            records = time_backwards(family, model, methods, runs)
            progress.clear()
            live.rows(map(row, records))
            every += records
    return every


def measure_memory(options: argparse.Namespace, progress: Progress) -> list[MemoryRecord]:
    """Family `memory`."""
    live = _table("memory: weights, the input and the output's gradient do not count", MEMORY_HEAD)
    every = []
    for name in options.models:
        progress.say(f"memory: {name}")
        records = follow_memory(MODELS[name](), _METHODS)
        progress.clear()
        live.rows(map(memory_row, records))
        every += records
    return every


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every gradient of torch_xmesh's was right, 1 when one was not, 2 for a wrong argument."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    torch.manual_seed(0)
    notes = [*machine_notes(), f"threads of torch: {torch.get_num_threads()}"]
    say("\n".join(f"# {note}" for note in ("torch_xmesh split_perf", *notes)))
    progress = Progress()
    records: list[TimeRecord | MemoryRecord] = [*measure_times(options, progress), *measure_memory(options, progress)]
    say("\n".join(f"# {line}" for line in (*error_lines(records), *bar_lines(records), wrong_note(records))))
    if options.json is not None:
        save(options.json, [record.to_json() for record in records], {"machine": notes, "runs": options.runs})
    return exit_code([record for record in records if record.method != TORCH.name])


if __name__ == "__main__":
    sys.exit(main())
