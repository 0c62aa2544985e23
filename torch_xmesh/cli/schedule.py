"""``xmesh schedule``: the schedule for a pipeline of equal stages, chosen by simulation."""

import argparse
import dataclasses

from torch_xmesh.pipeline.schedule.choice import choose_schedule
from torch_xmesh.pipeline.schedule.schedule import chain_edges
from torch_xmesh.pipeline.schedule.simulation import Costs, EdgeCosts, StageCosts, simulate


def run(options: argparse.Namespace) -> None:
    """Raises ValueError for options that do not go together."""
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
