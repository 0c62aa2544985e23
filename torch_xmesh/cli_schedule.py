"""``python -m torch_xmesh schedule``: the schedule for a pipeline of equal stages, chosen by simulation."""

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

from torch_xmesh.pipeline.schedule.choice import choose_schedule
from torch_xmesh.pipeline.schedule.schedule import chain_edges
from torch_xmesh.pipeline.schedule.simulation import Costs, EdgeCosts, StageCosts, simulate

_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def add_schedule_command(commands: Any) -> None:
    """Adds the command to an argument parser's subparsers."""
    parser = commands.add_parser("schedule", help="choose a pipeline's schedule by simulation, without any ranks")
    parser.set_defaults(run=_run)
    parser.add_argument("--stages", type=int, required=True, help="number of stages")
    parser.add_argument("--microbatches", type=int, required=True, help="per step")
    parser.add_argument("--forward-ms", type=_positive, required=True, help="F of one microbatch on one stage")
    parser.add_argument("--input-ms", type=_positive, help="I, the input gradients (default: as F)")
    parser.add_argument("--weight-ms", type=_positive, help="W, the weight gradients (default: as F)")
    parser.add_argument("--bytes", type=num_bytes, default=0, help="of a microbatch's values between stages: 64MiB")
    parser.add_argument("--nic", type=bytes_per_second, help="what a place's network interface carries: 25gbit")
    parser.add_argument("--latency-us", type=float, default=0.0, help="from the last byte sent until its use")
    parser.add_argument("--activation-bytes", type=num_bytes, help="held per microbatch until I (default: --bytes)")
    parser.add_argument("--weight-bytes", type=num_bytes, help="held between I and W (default: as until I)")
    parser.add_argument("--memory-limit", type=num_bytes, help="of each place: 40GiB")
    parser.add_argument("--early-weights", action="store_true", help="W may run before their turn where a place waits")
    parser.add_argument("--places", help="the place of each stage: 0,1,2,2,1,0 (default: one stage each)")
    parser.add_argument("--plot", type=Path, help="draw the winner's simulated step into this image")
    parser.add_argument("--csv", type=Path, help="write the winner in torch's notation")


def num_bytes(text: str) -> int:
    """Reads ``64MiB``, ``1.5GB``, ``4096``."""
    return round(_scaled(text, r"b?", _BYTES, "a number of bytes such as 64MiB"))


def bytes_per_second(text: str) -> float:
    """Reads ``25gbit`` (per second), as bytes per second."""
    return _scaled(text, r"bits?(?:/s)?", _BITS, "a rate such as 25gbit") / 8


def _scaled(text: str, unit: str, scales: dict[str, int], expected: str) -> float:
    match = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?{unit}\s*", text.lower())
    if match is None or (match[2] or "") not in scales:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return float(match[1]) * scales[match[2] or ""]


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number of milliseconds, got {text!r}")
    return value


def _run(options: argparse.Namespace) -> None:
    if options.bytes and options.nic is None:
        raise ValueError("--bytes needs --nic, the rate at which they are carried")
    if options.stages < 1:
        raise ValueError(f"--stages must be at least 1, got {options.stages}")
    forward_ms = options.forward_ms
    stage = StageCosts(
        forward_seconds=forward_ms / 1e3,
        backward_input_seconds=(options.input_ms or forward_ms) / 1e3,
        backward_weight_seconds=(options.weight_ms or forward_ms) / 1e3,
        activation_bytes=options.bytes if options.activation_bytes is None else options.activation_bytes,
        weight_bytes=options.weight_bytes,
    )
    costs = Costs(
        stages=[stage] * options.stages,
        edges=dict.fromkeys(chain_edges(options.stages), EdgeCosts(forward_bytes=options.bytes)),
        nic_bytes_per_s=options.nic,
        latency_seconds=options.latency_us / 1e6,
        early_weights=options.early_weights,
    )
    choice = choose_schedule(
        costs,
        num_stages=options.stages,
        num_microbatches=options.microbatches,
        memory_limit_bytes=options.memory_limit,
        place_of_stage=None if options.places is None else _places(options.places, options.stages),
    )
    print(choice)
    print()
    print(choice.schedule, end="")
    if options.plot is not None:
        simulate(choice.schedule, dataclasses.replace(costs, early_weights=choice.early_weights)).plot(options.plot)
    if options.csv is not None:
        choice.schedule.to_csv(options.csv)


def _places(text: str, num_stages: int) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts) or len(parts) != num_stages:
        raise ValueError(f"--places is one place per stage, {num_stages} numbers joined by commas, got {text!r}")
    return [int(part) for part in parts]
