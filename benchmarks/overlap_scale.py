"""HiDup's models in their own size on clusters that are not here, on paper: the plans that are found with one half of a
microbatch computing while the other communicates, and without, simulated on 2 to 64 devices.

    python benchmarks/overlap_scale.py --json out.json --plot out.png

BERT and ViT of 8 layers of width 768, every second one with two experts a device, 32 samples a device, as in S. Zhang
et al., SoCC 2022. A device reaches 10 TFLOP/s and 700 GB/s. Those of a host share links of 100 GB/s each; 2, 4 and 8
devices are on one host or on two, 64 on eight. Nothing is executed, so there is no #wrong column.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from parts.overlap.models import paper_subject
from parts.shared.charts import INCHES, new_figure, save_figure
from parts.shared.harness import machine_notes, save
from parts.shared.table import LiveTable

import torch_xmesh as xm
from torch_xmesh.palette import colors_of

MODELS = ("BERT SGMoE", "BERT Switch", "ViT SGMoE", "ViT Switch")
NETWORKS = {"one host": 0, "100 Gbit/s": 12_500_000_000, "10 Gbit/s": 1_250_000_000}
"""By name the bytes per second of a host's network interface."""
_COMPUTE = xm.Compute(flops=10e12, bytes_per_s=700e9)
_LOCAL_BYTES_PER_S, _LATENCY_US, _LOCAL_LATENCY_US = 100_000_000_000, 20.0, 10.0
_MOST_ON_ONE_HOST = 8
_ORDERS: dict[str, dict[str, Any]] = {
    "unsplit": {"overlap": False, "num_layers": 1},
    "duplex": {"schedule": "duplex", "num_layers": 1},
    "overlap": {"num_layers": 1},
    "auto": {},
}
"""By method: of one stage, as HiDup has them; "auto" has stages, too."""
_HEAD = (
    ("case", ""),
    ("method", ""),
    ("step", "(ms)"),
    ("/unsplit", ""),
    ("R", ""),
    ("computed", "(ms)"),
    ("moved", "(ms)"),
    ("hidden", "(ms)"),
    ("found in", "(s)"),
    ("plan", ""),
)


@dataclass(frozen=True)
class Record:
    """One model's plan on one cluster, for the stage that works longest.

    Attributes:
        compute_seconds, moved_seconds, hidden_seconds: what its devices compute, what they exchange, and what of that
            is exchanged while they compute.
        found_seconds: of the search.
    """

    model: str
    network: str
    devices: int
    method: str
    step_seconds: float
    compute_seconds: float
    moved_seconds: float
    hidden_seconds: float
    found_seconds: float
    plan: str

    @property
    def case(self) -> str:
        return f"{self.model}, {self.network}, {self.devices}"


def cluster_of(network: str, devices: int) -> dict[str, Any] | None:
    """The planner's arguments; None where there is no such cluster."""
    if network == "one host" and devices > _MOST_ON_ONE_HOST:
        return None
    hosts = 1 if network == "one host" else max(2, devices // _MOST_ON_ONE_HOST)
    topology = xm.Topology(
        devices_per_host=devices // hosts,
        nic_bytes_per_s=NETWORKS[network] or None,
        local_bytes_per_s=_LOCAL_BYTES_PER_S,
        latency_us=_LATENCY_US,
        local_latency_us=_LOCAL_LATENCY_US,
    )
    mesh = xm.Mesh(torch.arange(devices).view(hosts, -1), device_type="cuda")
    return {"devices": mesh, "topology": topology, "compute": _COMPUTE}


def measure(models: Sequence[str], devices: Sequence[int]) -> Iterator[list[Record]]:
    """All methods of each case."""
    for model in models:
        for network in NETWORKS:
            for count in devices:
                cluster = cluster_of(network, count)
                if cluster is not None:
                    yield [_record(model, network, count, method, cluster) for method in _ORDERS]


def _record(model: str, network: str, devices: int, method: str, cluster: dict[str, Any]) -> Record:
    begin = time.perf_counter()
    one = paper_subject(model, devices)
    options = {**cluster, **_ORDERS[method], "num_microbatches": 1, "loss_fn": one.loss_fn}
    plan = xm.plan_parallel(one.make(), (one.batch,), **options)
    step, meshes = plan.step, " | ".join("x".join(map(str, stage.mesh_shape)) for stage in plan.stages)
    return Record(
        model=model,
        network=network,
        devices=devices,
        method=method,
        step_seconds=step.total,
        compute_seconds=step.compute,
        moved_seconds=step.collectives + step.sums,
        hidden_seconds=step.hidden,
        found_seconds=time.perf_counter() - begin,
        plan=f"{meshes} {plan.schedule}",
    )


def rows(records: Sequence[Record]) -> list[list[str]]:
    """As the table shows one case; the first method is unsplit."""
    unsplit = records[0]
    return [
        [
            one.case,
            one.method,
            f"{one.step_seconds * 1e3:.0f}",
            f"{one.step_seconds / unsplit.step_seconds:.2f}",
            f"{one.moved_seconds / one.compute_seconds:.2f}",
            f"{one.compute_seconds * 1e3:.0f}",
            f"{one.moved_seconds * 1e3:.0f}",
            f"{one.hidden_seconds * 1e3:.0f}",
            f"{one.found_seconds:.1f}",
            one.plan,
        ]
        for one in records
    ]


def plot(path: Path, records: Sequence[Record]) -> None:
    """A step's time over the number of devices: a row of axes for each model, a column for each network."""
    models = list(dict.fromkeys(one.model for one in records))
    colors = dict(zip(_ORDERS, colors_of(list(_ORDERS)), strict=True))
    figure = new_figure(INCHES * 1.2, 2.4 * len(models) + 0.6)
    axes = figure.subplots(len(models), len(NETWORKS), squeeze=False)
    for row, model in enumerate(models):
        for column, network in enumerate(NETWORKS):
            here = axes[row][column]
            for method, color in colors.items():
                mine = [one for one in records if (one.model, one.network, one.method) == (model, network, method)]
                seconds = [1e3 * one.step_seconds for one in mine]
                here.plot([one.devices for one in mine], seconds, "o-", color=color, ms=3, label=method)
            here.set_xscale("log", base=2)
            here.set_yscale("log")
            here.set_title(f"{model}, {network}", fontsize=9)
        axes[row][0].set_ylabel("step, ms")
    for here in axes[-1]:
        here.set_xlabel("devices, 32 samples each")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8, frameon=False
    )
    save_figure(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 2 for a wrong argument."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--devices", default="2,4,8,64", help="comma-separated, even (default 2,4,8,64)")
    parser.add_argument("--json", type=Path, help="write the records here")
    parser.add_argument("--plot", type=Path, help="draw steps over devices here (PNG)")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    models, devices = options.models.split(","), [int(part) for part in options.devices.split(",")]
    if unknown := sorted(set(models) - set(MODELS)):
        parser.error(f"there are no models {unknown}; there are {list(MODELS)}")
    if any(count < 2 or count % 2 for count in devices):
        parser.error(f"--devices are even numbers, got {options.devices}")
    live = LiveTable(_HEAD, [[f"{model}, {name}, 64" for model in models for name in NETWORKS], list(_ORDERS)])
    live.begin(["torch_xmesh overlap_scale, simulated", *machine_notes()])
    records: list[Record] = []
    for found in measure(models, devices):
        live.rows(rows(found))
        records += found
    on_one_host = [one.step_seconds / two.step_seconds for one, two in _pairs(records)]
    live.note(f"on one host overlap takes at most {max(on_one_host, default=0):.2f} of unsplit")
    if options.json is not None:
        save(options.json, [asdict(one) for one in records], {"suite": "overlap_scale", "machine": machine_notes()})
    if options.plot is not None:
        plot(options.plot, records)
    return 0


def _pairs(records: Sequence[Record]) -> Iterator[tuple[Record, Record]]:
    """Overlapped and unsplit, of the cases on one host."""
    local = {(one.case, one.method): one for one in records if one.network == "one host"}
    for (case, method), one in local.items():
        if method == "overlap":
            yield one, local[case, "unsplit"]


if __name__ == "__main__":
    sys.exit(main())
