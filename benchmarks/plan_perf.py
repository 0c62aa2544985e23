"""Measures planning alone: python benchmarks/plan_perf.py [--json plans.json]

Family `cases`: the nine many-to-many cases at full size under every strategy. Family `random`: seeds 0-999 under
`striped` and the broadcast strategies. One record per layout and strategy; the summary prints percentiles of predicted
/ bound. README.md beside this file defines them.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import Case, TensorLayout, table2
from hard import BROADCASTS
from methods import placement
from overlaps import bound_seconds
from random_layouts import random_layout

import torch_xmesh as xm

_FULL_BYTES = 2 << 30
_NIC_BYTES_PER_S = 1_250_000_000
_CASE_STRATEGIES = ("striped", "auto", "broadcast", "local_allgather", "global_allgather", "alpa", "send_recv")
_RANDOM_STRATEGIES = ("striped:num_chunks=64", "striped:num_chunks=256", *BROADCASTS)
_RANDOM_ITEMS = 1 << 26
_HARD = 1.02


@dataclass(frozen=True)
class PlanRecord:
    """`num_chunks_bound`: chunks that the busiest NIC carries at the least, bound bytes over the plan's largest
    message; `predicted_ratio`: simulated time over the lower bound, None where nothing has to leave a host."""

    case: str
    strategy: str
    num_chunks_bound: int
    predicted_ratio: float | None
    plan_seconds: float


def plan_case(case: Case, strategy: str, devices_per_host: int, repeats: int) -> PlanRecord:
    """Plans the case `repeats` times without a cache hit and keeps the median time. Raises ValueError where it cannot
    be planned."""
    ranks = np.union1d(case.src_mesh, case.dst_mesh).tolist()
    host_of = {rank: rank // devices_per_host for rank in ranks}
    layout = case.tensors[0]
    src = [placement(text) for text in layout.src]
    dst = [placement(text) for text in layout.dst]
    spec = xm.Spec(layout.shape, getattr(torch, layout.dtype), xm.Mesh(case.src_mesh), src)
    times = []
    for repeat in range(repeats):
        # A topology that differs in an unused number is another key, so that no cached plan answers.
        topology = xm.Topology(host_of=host_of, nic_bytes_per_s=_NIC_BYTES_PER_S + repeat)
        start = time.perf_counter()
        plan = xm.plan_resharding(spec, xm.Mesh(case.dst_mesh), dst, strategy=strategy, topology=topology)
        times.append(time.perf_counter() - start)
    bound = bound_seconds(case, lambda rank: rank // devices_per_host, _Uniform(_NIC_BYTES_PER_S + repeats - 1))
    ratio = float(plan.predicted_seconds) / bound if bound > 0 else None
    return PlanRecord(case.name, strategy, _num_chunks(plan, host_of), ratio, statistics.median(times))


def _num_chunks(plan: xm.ReshardingPlan, host_of: dict[int, int]) -> int:
    """The bound's bytes over the largest message between hosts, 0 when there is none. For tensors of 4-byte items."""
    messages = json.loads(plan.to_json())["messages"]
    sizes = [(end - begin) * 4 for _, begin, end, src, dst, *_ in messages if host_of[src] != host_of[dst]]
    return math.ceil(plan.lower_bound_bytes / max(sizes)) if sizes else 0


class _Uniform(Sequence[float]):
    """The same NIC rate for every host."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def __getitem__(self, host: Any) -> Any:
        return self._rate

    def __len__(self) -> int:
        return sys.maxsize


def _is_known(strategy: str) -> bool:
    """Whether this build has the strategy: planned on a reshard of 8 bytes."""
    spec = xm.Spec((2,), torch.float32, xm.Mesh([0]), [placement("Replicate()")])
    try:
        xm.plan_resharding(
            spec, xm.Mesh([1]), [placement("Shard(0)")], strategy=strategy, topology=xm.Topology(devices_per_host=1)
        )
    except ValueError:
        return False
    return True


def random_family(seeds: Sequence[int]) -> Iterator[tuple[Case, int]]:
    """The random layouts as cases, with their devices per host."""
    for seed in seeds:
        layout = random_layout(seed, num_items=_RANDOM_ITEMS)
        tensor = TensorLayout(layout.shape, "float32", layout.src, layout.dst)
        yield Case(f"seed{seed}", layout.src_mesh, layout.dst_mesh, (tensor,)), layout.devices_per_host


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` per cent of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def summarize(records: Sequence[PlanRecord]) -> list[str]:
    """Per strategy: median, p95, p99 and maximum of predicted / bound, over all layouts and where naive exceeds
    1.02."""
    naive = {record.case: record.predicted_ratio for record in records if record.strategy == BROADCASTS[0]}
    hard = {case for case, ratio in naive.items() if ratio is not None and ratio > _HARD}
    lines = [f"{'layouts':<16}{'strategy':<24}{'count':>6}{'median':>9}{'p95':>9}{'p99':>9}{'max':>9}{'plan ms':>9}"]
    for label, chosen in (("all", set(naive)), ("naive > 1.02", hard)):
        for strategy in dict.fromkeys(record.strategy for record in records):
            kept = [record for record in records if record.strategy == strategy and record.case in chosen]
            ratios = [record.predicted_ratio for record in kept if record.predicted_ratio is not None]
            if ratios:
                spread = "".join(f"{percentile(ratios, p):>9.3f}" for p in (50, 95, 99, 100))
                plan_ms = statistics.median(record.plan_seconds for record in kept) * 1e3
                lines.append(f"{label:<16}{strategy:<24}{len(ratios):>6}{spread}{plan_ms:>9.2f}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="number of random layouts (default 1000)")
    parser.add_argument("--repeats", type=int, default=5, help="plans of each published case (default 5)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    absent = [name for name in (*_CASE_STRATEGIES, *_RANDOM_STRATEGIES) if not _is_known(name)]
    if absent:
        print(f"# not in this build: {', '.join(dict.fromkeys(absent))}")
    records = []
    print(f"{'case':<8}{'strategy':<20}{'predicted/bound':>16}{'plan ms':>10}")
    for case in table2(_FULL_BYTES, 4):
        for strategy in (name for name in _CASE_STRATEGIES if name not in absent):
            record = plan_case(case, strategy, 4, options.repeats)
            records.append(record)
            ratio = "-" if record.predicted_ratio is None else f"{record.predicted_ratio:.4f}"
            print(f"{record.case:<8}{strategy:<20}{ratio:>16}{record.plan_seconds * 1e3:>10.3f}")
    family = [
        plan_case(case, strategy, devices_per_host, 1)
        for case, devices_per_host in random_family(range(options.seeds))
        for strategy in _RANDOM_STRATEGIES
        if strategy not in absent
    ]
    if family:
        print("\n".join(summarize(family)))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(record) for record in [*records, *family]], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
