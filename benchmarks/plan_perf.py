"""Measures planning alone: python benchmarks/plan_perf.py [--json plans.json]

Family `cases`: the nine many-to-many cases at full size under every strategy. Family `scale`: `striped` on 64, 256 and
1,024 hosts. Family `random`: seeds 0-999 under `striped` and the broadcast strategies, where only bytes cost time and
once more with default latencies. One record per layout and strategy; summaries give percentiles of predicted / bound
and say which bars are met. README.md beside this file defines them.
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

import torch
import torch.distributed as dist
from parts.resharding.cases import Case, TensorLayout, table2
from parts.resharding.hard import BROADCASTS
from parts.resharding.methods import placement
from parts.resharding.overlaps import bound_seconds, overlaps
from parts.resharding.plan_bars import (
    CACHED_BAR_MS,
    CASES_BAR_MS,
    SCALE_BAR_MS,
    PlanRecord,
    percentile,
    quality_lines,
    time_line,
)
from parts.resharding.random_layouts import random_layout
from parts.resharding.scale_layouts import DEVICES, scale_cases
from parts.shared.harness import machine_notes, save
from parts.shared.progress import Progress
from parts.shared.table import say

import torch_xmesh as xm
from torch_xmesh import _C

_FULL_BYTES = 2 << 30
_NIC_BYTES_PER_S = 1_250_000_000
_CASE_STRATEGIES = ("auto", *_C.strategy_names())
_RANDOM_STRATEGIES = ("striped:num_chunks=64", "striped:num_chunks=256", "striped", *BROADCASTS)
_RANDOM_ITEMS = 1 << 26
_ITEM_BYTES = 4
_HARD = 1.02
_BYTES_ONLY = {"local_bytes_per_s": 10**15, "latency_us": 0.0, "message_us": 0.0, "local_latency_us": 0.0}
"""The model of the quality bars: NICs, store and forward, and nothing else that costs time."""


@dataclass(frozen=True, eq=False)
class Layout:
    """A case on hosts of `devices_per_host` ranks. `bound_bytes`: the bound times the NICs' rate; `fan`: most hosts
    that need one slice from outside."""

    case: Case
    devices_per_host: int
    bound_bytes: float
    fan: int

    @classmethod
    def of(cls, case: Case, devices_per_host: int) -> "Layout":
        def host_of(rank: int) -> int:
            return rank // devices_per_host

        remote = [set(map(host_of, part.needers)) - set(map(host_of, part.holders)) for part in overlaps(case)]
        return cls(case, devices_per_host, bound_seconds(case, host_of, _Uniform(1.0)), max(map(len, remote)))


class _Uniform(Sequence[float]):
    """The same NIC rate for every host."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def __getitem__(self, host: Any) -> Any:
        return self._rate

    def __len__(self) -> int:
        return sys.maxsize


def timed_plan(
    case: Case, strategy: str, devices_per_host: int, repeats: int, links: dict[str, Any]
) -> tuple[xm.ReshardingPlan, float]:
    """Plans the case `repeats` times; the last plan and the median of the thread's CPU time, which is all that
    planning takes: it uses one thread and waits for nothing. Raises ValueError where it cannot be planned."""
    layout = case.tensors[0]
    src = [placement(text) for text in layout.src]
    dst = [placement(text) for text in layout.dst]
    spec = xm.Spec(layout.shape, getattr(torch, layout.dtype), xm.Mesh(case.src_mesh), src)
    dst_mesh = xm.Mesh(case.dst_mesh)
    topology = xm.Topology(devices_per_host=devices_per_host, nic_bytes_per_s=_NIC_BYTES_PER_S, **links)
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        plan = xm.plan_resharding(spec, dst_mesh, dst, strategy=strategy, topology=topology)
        times.append(time.thread_time() - start)
    return plan, statistics.median(times)


def plan_layout(layout: Layout, strategy: str, repeats: int, links: dict[str, Any], suffix: str = "") -> PlanRecord:
    """The record of one layout and strategy."""
    plan, seconds = timed_plan(layout.case, strategy, layout.devices_per_host, repeats, links)
    bound = layout.bound_bytes / _NIC_BYTES_PER_S
    ratio = float(plan.predicted_seconds) / bound if bound > 0 else None
    return PlanRecord(layout.case.name + suffix, strategy, _num_chunks(plan, layout), ratio, seconds)


def _num_chunks(plan: xm.ReshardingPlan, layout: Layout) -> int:
    """The bound's bytes over the largest message between hosts, 0 when there is none. For tensors of 4-byte items."""
    messages = json.loads(plan.to_json())["messages"]
    devices = layout.devices_per_host
    sizes = [
        (end - begin) * _ITEM_BYTES for _, begin, end, src, dst, *_ in messages if src // devices != dst // devices
    ]
    return math.ceil(layout.bound_bytes / max(sizes)) if sizes else 0


def random_family(seeds: Sequence[int]) -> Iterator[Layout]:
    """The random layouts."""
    for seed in seeds:
        layout = random_layout(seed, num_items=_RANDOM_ITEMS)
        tensor = TensorLayout(layout.shape, "float32", layout.src, layout.dst)
        yield Layout.of(Case(f"seed{seed}", layout.src_mesh, layout.dst_mesh, (tensor,)), layout.devices_per_host)


def cached_seconds(repeats: int) -> float:
    """Median time of a reshard that moves nothing on a group of one rank, its plan made before: the way to a cached
    plan, and what every call does besides."""
    dist.init_process_group("xmesh", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.DeviceMesh("cpu", [0], _init_backend=False)
        tensor = dist.tensor.DTensor.from_local(torch.zeros(1), mesh, [placement("Replicate()")], run_check=False)
        times = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            xm.reshard(tensor, mesh, [placement("Replicate()")])
            times.append(time.perf_counter() - start)
    finally:
        dist.destroy_process_group()
    return statistics.median(times[1:])


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


def measure_cases(strategies: Sequence[str], repeats: int) -> list[PlanRecord]:
    """The nine cases under every strategy."""
    records = []
    say(f"{'case':<8}{'strategy':<20}{'predicted/bound':>16}{'plan ms':>10}")
    for case in table2(_FULL_BYTES, 4):
        layout = Layout.of(case, 4)
        for strategy in strategies:
            record = plan_layout(layout, strategy, repeats, {})
            records.append(record)
            ratio = "-" if record.predicted_ratio is None else f"{record.predicted_ratio:.4f}"
            say(f"{record.case:<8}{strategy:<20}{ratio:>16}{record.plan_seconds * 1e3:>10.3f}")
    own = [record for record in records if record.strategy == "striped"]
    say(time_line("nine cases, striped", own, CASES_BAR_MS))
    return records


def measure_scale(sizes: Sequence[int], repeats: int) -> list[PlanRecord]:
    """`striped` on many hosts. The bound is the plan's own: enumerating host sets would never end."""
    every = []
    say(f"{'case':<20}{'messages':>9}{'predicted/bound':>16}{'bytes only':>12}{'plan ms':>10}")
    for num_hosts in sizes:
        records = []
        for case in scale_cases(num_hosts):
            plan, seconds = timed_plan(case, "striped", DEVICES, repeats, {})
            bound = plan.lower_bound_seconds
            ratio = plan.predicted_seconds / bound if bound > 0 else None
            num_messages = plan.num_messages
            plan, _ = timed_plan(case, "striped", DEVICES, 1, _BYTES_ONLY)
            records.append(PlanRecord(case.name, "striped", None, ratio, seconds))
            shown = ("-", "-") if ratio is None else (f"{ratio:.4f}", f"{plan.predicted_seconds / bound:.4f}")
            say(f"{case.name:<20}{num_messages:>9}{shown[0]:>16}{shown[1]:>12}{seconds * 1e3:>10.2f}")
        say(time_line(f"{num_hosts} hosts, striped", records, SCALE_BAR_MS[num_hosts]))
        every += records
    return every


def measure_random(num_seeds: int, strategies: Sequence[str]) -> list[PlanRecord]:
    """The random family in the bars' model, then with default latencies."""
    layouts = list(random_family(range(num_seeds)))
    every = []
    for title, links, suffix in (("bytes only", _BYTES_ONLY, ""), ("default latencies", {}, " latency")):
        records, progress, began = [], Progress(), time.monotonic()
        for number, layout in enumerate(layouts):
            left = (time.monotonic() - began) / number * (len(layouts) - number) if number else float("nan")
            progress.say(f"random layouts, {title}: {number} of {len(layouts)}; about {left:.0f} s left")
            records += [plan_layout(layout, strategy, 1, links, suffix) for strategy in strategies]
        progress.clear()
        say(f"# random layouts, {title}")
        say("\n".join(summarize(records)))
        fans = {layout.case.name + suffix: layout.fan for layout in layouts}
        items = {layout.case.name + suffix: layout.bound_bytes / _ITEM_BYTES for layout in layouts}
        say("\n".join(quality_lines(records, fans, items)))
        every += records
    return every


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="number of random layouts (default 1000)")
    parser.add_argument("--repeats", type=int, default=5, help="plans of each published case (default 5)")
    parser.add_argument(
        "--hosts", type=int, nargs="*", choices=list(SCALE_BAR_MS), default=list(SCALE_BAR_MS), help="sizes of `scale`"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    machine = machine_notes()
    say("\n".join(f"# {note}" for note in ("torch_xmesh plan_perf", *machine)))
    records = measure_cases(_CASE_STRATEGIES, options.repeats)
    cached = cached_seconds(500)
    say(f"# a whole cached call, one rank: {cached * 1e6:.1f} us; bar for the plan's part {CACHED_BAR_MS * 1e3:.0f} us")
    if options.hosts:
        records += measure_scale(options.hosts, min(3, options.repeats))
    if options.seeds:
        records += measure_random(options.seeds, _RANDOM_STRATEGIES)
    if options.json is not None:
        about = {"machine": machine, "repeats": options.repeats, "hosts": options.hosts, "seeds": options.seeds}
        save(options.json, [asdict(record) for record in records], about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
