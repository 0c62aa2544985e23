"""Pipelines too large to run here, on paper: every schedule of a GPT of 39 billion parameters, simulated.

    python benchmarks/schedule_scale.py --json out.json --plot out.png

48 layers of width 8,192 over sequences of 1,024 tokens are cut into n equal stages (past 48: parts of layers), a
microbatch is one sequence. A stage's place has 8 devices at 50 TFLOP/s each, as reached, and one NIC of 25 Gbit/s. F
follows from the layers' operations, I and W take as long each; what a microbatch holds follows Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, 2023, section 4.1, without the attention's part. Records
say how long `xm.choose_schedule` took. Nothing is executed, so there is no #wrong column: every schedule is validated
as it is made.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from parts.shared.charts import INCHES, new_figure, save_figure
from parts.shared.harness import machine_notes, save
from parts.shared.table import LiveTable

import torch_xmesh as xm
from torch_xmesh.palette import colors_of

_LAYERS, _WIDTH, _TOKENS = 48, 8192, 1024
_DEVICES, _FLOPS, _NIC_BYTES_PER_S = 8, 50e12, 25e9 / 8
_CHOICE_BAR_SECONDS = 10.0
_HEAD = (
    ("case", ""),
    ("schedule", ""),
    ("step", "(s)"),
    ("bubble", "(%)"),
    ("peak", "(GiB)"),
    ("chosen in", "(s)"),
)


@dataclass(frozen=True)
class Record:
    """One schedule on one pipeline. `bubble`: the part of the step in which a place computes nothing; `chosen_seconds`:
    of the search that it was a candidate of."""

    stages: int
    microbatches: int
    schedule: str
    step_seconds: float
    bubble: float
    peak_bytes: int
    is_chosen: bool
    chosen_seconds: float

    @property
    def point(self) -> str:
        return f"n{self.stages} m{self.microbatches}"


def costs(num_stages: int) -> xm.Costs:
    """Costs of the model above, cut into `num_stages` equal stages."""
    layers = _LAYERS / num_stages
    forward = layers * 24 * _TOKENS * _WIDTH**2 / (_DEVICES * _FLOPS)
    stage = xm.StageCosts(
        forward_seconds=forward,
        backward_input_seconds=forward,
        backward_weight_seconds=forward,
        activation_bytes=round(layers * 34 * _TOKENS * _WIDTH),
        weight_bytes=round(layers * 28 * _TOKENS * _WIDTH),  # inputs of four products, and their outputs' gradients
    )
    edge = xm.EdgeCosts(forward_bytes=2 * _TOKENS * _WIDTH)
    edges: dict[tuple[int, int], xm.EdgeCosts | float] = {(k, k + 1): edge for k in range(num_stages - 1)}
    return xm.Costs(stages=[stage] * num_stages, edges=edges, nic_bytes_per_s=_NIC_BYTES_PER_S)


def measure(stages: Sequence[int], microbatches: Sequence[int]) -> Iterator[list[Record]]:
    """The candidates of each pipeline, the fastest first."""
    for num_stages in stages:
        given = costs(num_stages)
        for count in microbatches:
            begin = time.perf_counter()
            choice = xm.choose_schedule(given, num_stages=num_stages, num_microbatches=count)
            seconds = time.perf_counter() - begin
            busy = 3 * count * given.stages[0].forward_seconds
            yield [
                Record(
                    stages=num_stages,
                    microbatches=count,
                    schedule=one.schedule.name,
                    step_seconds=one.step_seconds,
                    bubble=1 - busy / one.step_seconds,
                    peak_bytes=max(one.peak_bytes),
                    is_chosen=one.schedule is choice.schedule,
                    chosen_seconds=seconds,
                )
                for one in choice.candidates
                if one.schedule is choice.schedule or one.schedule.name in xm.Schedule.names()
            ]


def rows(records: Sequence[Record]) -> list[list[str]]:
    """As the table shows them."""
    return [
        [
            one.point,
            one.schedule + (" *" if one.is_chosen else ""),
            f"{one.step_seconds:.3f}",
            f"{100 * one.bubble:.1f}",
            f"{one.peak_bytes / 2**30:.1f}",
            f"{one.chosen_seconds:.2f}" if one.is_chosen else "",
        ]
        for one in records
    ]


def plot(path: Path, records: Sequence[Record]) -> None:
    """Bubble and peak over the microbatches, one column of axes for each number of stages."""
    stages = sorted({one.stages for one in records})
    names = [name for name in xm.Schedule.names() if any(one.schedule == name for one in records)]
    colors = dict(zip(["chosen", *names], colors_of(["auto", *names]), strict=True))
    figure = new_figure(INCHES * 1.3, 5.5)
    axes = figure.subplots(2, len(stages), squeeze=False, sharex=True)
    for column, count in enumerate(stages):
        for name, color in colors.items():
            mine = [
                one
                for one in records
                if one.stages == count and (one.is_chosen if name == "chosen" else one.schedule == name)
            ]
            x = [one.microbatches for one in mine]
            width = 2.4 if name == "chosen" else 1.2
            axes[0][column].plot(x, [100 * one.bubble for one in mine], "o-", color=color, lw=width, ms=3, label=name)
            axes[1][column].plot(x, [one.peak_bytes / 2**30 for one in mine], "o-", color=color, lw=width, ms=3)
        axes[0][column].set_title(f"{count} stages", fontsize=9)
        axes[1][column].set_xlabel("microbatches")
        axes[1][column].set_xscale("log", base=2)
        axes[1][column].set_yscale("log")
    axes[0][0].set_ylabel("bubble, %")
    axes[1][0].set_ylabel("held on the fullest place, GiB")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=6, fontsize=8, frameon=False
    )
    save_figure(figure, path)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 2 for a wrong argument."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=_numbers, default=[8, 16, 32, 64], help="comma-separated (8,16,32,64)")
    parser.add_argument("--microbatches", type=_numbers, default=[64, 256, 1024], help="comma-separated (64,256,1024)")
    parser.add_argument("--json", type=Path, help="write the records here")
    parser.add_argument("--plot", type=Path, help="draw bubbles and peaks here (PNG)")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    live = LiveTable(_HEAD, [["n64 m1024"], ["interleaved_zb *"]])
    live.begin(["torch_xmesh schedule_scale, simulated; * is what choose_schedule takes", *machine_notes()])
    records: list[Record] = []
    for found in measure(options.stages, options.microbatches):
        live.rows(rows(found))
        records += found
    slowest = max(one.chosen_seconds for one in records)
    is_met = "met" if slowest <= _CHOICE_BAR_SECONDS else "MISSED"
    live.note(f"longest choice {slowest:.2f} s, bar {_CHOICE_BAR_SECONDS:g} s: {is_met}")
    if options.json is not None:
        save(options.json, [asdict(one) for one in records], {"suite": "schedule_scale", "machine": machine_notes()})
    if options.plot is not None:
        plot(options.plot, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
