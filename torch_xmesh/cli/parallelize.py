"""``xmesh parallelize``: an automatic plan for a model in a file, or a table of it beside presets."""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_xmesh.parallelism import Compute, OperatorTimes, ParallelPlan, plan_parallel, presets
from torch_xmesh.parallelism.cost_tables import collective_table, compute_table
from torch_xmesh.parallelism.plan_text import bytes_text, seconds_text
from torch_xmesh.parallelism.subjects import subject_of
from torch_xmesh.spec import Mesh
from torch_xmesh.topology import Topology


def run(options: argparse.Namespace) -> None:
    """Raises ValueError for what cannot be planned, and for options that do not go together."""
    given = _options(options)
    if options.is_training:
        shown = [name for name in ("costs", "compare", "explain", "save", "plot", "json") if getattr(options, name)]
        if shown:
            raise ValueError(f"--run prints the plan that it measures: leave --{shown[0]} out")
        given["devices"] = Mesh(given["devices"], device_type="cpu")
        _train(options, given)
        return
    model, args, kwargs = _made(options.model)
    try:
        if options.costs:
            subject = subject_of(model, args, kwargs, **given)
            print(f"{collective_table(subject)}\n\n{compute_table(subject)}\n")
        plan = plan_parallel(model, args, kwargs, max_seconds=options.max_seconds, **given)
    finally:
        if options.times:
            given["compute"].save(options.times)
    if options.save:
        plan.save(options.save)
    if options.plot:
        plan.plot(options.plot)
    if options.json:
        print(plan.to_json())
        return
    print(compared(plan, model, args, kwargs, given) if options.compare else plan)
    if options.explain:
        print(plan.explain(options.explain))


def _train(options: argparse.Namespace, given: dict[str, Any]) -> None:
    """In a process for each device, each of which makes the same model."""
    from torch_xmesh.cli.training import is_rank, run_plan, start_ranks

    if not is_rank():
        status = start_ranks(given["devices"].size(), options.arguments)
        if status:
            raise SystemExit(status)
        return
    torch.manual_seed(0)
    model, args, kwargs = _made(options.model)
    run_plan(
        model,
        args,
        kwargs,
        given,
        lambda measured: plan_parallel(model, args, kwargs, max_seconds=options.max_seconds, **measured),
    )


def _made(text: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model of a file's function, with its arguments; parameters are on meta where the function lets them be."""
    path, colon, name = text.rpartition(":")
    if not colon:
        raise ValueError(f"model is file:function, got {text!r}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).exists():
        raise ValueError(f"there is no Python file {path!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    make: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(make):
        raise ValueError(f"{path} has no function {name!r}")
    made = make()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise ValueError(f"{text} returns (model, args) or (model, args, kwargs), got {type(made).__name__}")
    args = made[1] if isinstance(made[1], tuple) else (made[1],)
    return made[0], args, dict(made[2]) if len(made) == 3 else {}


def _options(options: argparse.Namespace) -> dict[str, Any]:
    try:
        hosts, devices = map(int, options.mesh.lower().split("x"))
    except ValueError:
        raise ValueError(f"--mesh is hosts x devices of each, as 2x4, got {options.mesh!r}") from None
    if hosts < 1 or devices < 1:
        raise ValueError(f"--mesh is hosts x devices of each, as 2x4, got {options.mesh!r}")
    if (options.flops is None) != (options.bytes_per_s is None):
        raise ValueError("give --flops and --bytes-per-s, or neither")
    compute = None if options.flops is None else Compute(options.flops, options.bytes_per_s)
    if options.times is not None:
        compute = _times(options)
    topology = None if options.topology is None else Topology.load(options.topology)
    return {
        "devices": Mesh(torch.arange(hosts * devices).reshape(hosts, devices)),
        "overlap": {"auto": "auto", "yes": True, "no": False}[options.overlap],
        "num_microbatches": options.microbatches,
        "memory_limit_bytes": options.memory_limit,
        "compute": compute,
        "topology": topology,
        "schedule": options.schedule,
        "collectives": options.collectives,
    }


def _times(options: argparse.Namespace) -> OperatorTimes:
    """Ranks of one plan are given what one process has measured before, with one thread, as they have."""
    if options.flops is not None:
        raise ValueError("give --times, or --flops and --bytes-per-s")
    if options.is_training:
        if not options.times.exists():
            raise ValueError(f"there is no {options.times}: without --run it is measured and written")
        return OperatorTimes.load(options.times)
    torch.set_num_threads(1)
    return OperatorTimes.load(options.times, "cpu") if options.times.exists() else OperatorTimes.measured()


def compared(
    plan: ParallelPlan, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, Any]
) -> str:
    """A line for the plan and for each preset: the predicted step, what a device holds at most."""
    devices, per_host = plan.devices, given["devices"].shape[-1]
    hosts = devices // per_host
    rows: list[tuple[str, Callable[..., ParallelPlan], dict[str, Any]]] = [
        ("data parallel", presets.data_parallel, {}),
        ("ZeRO-2", presets.zero_2, {}),
        ("ZeRO-3", presets.zero_3, {}),
    ]
    for tensor in dict.fromkeys((per_host, devices)):
        if tensor > 1:
            rows.append((f"Megatron {tensor}", presets.megatron, {"tensor_parallel": tensor}))
    for stages in dict.fromkeys((hosts, devices)):
        if stages > 1:
            rows.append((f"pipeline {stages}", presets.pipeline, {"num_stages": stages}))
    if hosts > 1 and per_host > 1:
        rows.append(
            (
                f"pipeline {hosts} x Megatron {per_host}",
                presets.pipeline,
                {"num_stages": hosts, "tensor_parallel": per_host},
            )
        )
    lines = [f"{'plan':28} {'stages':>6} {'step':>10} {'over found':>10} {'most bytes':>11}", _row("found", plan, plan)]
    for title, preset, more in rows:
        try:
            lines.append(_row(title, preset(model, args, example_kwargs=kwargs, **more, **given), plan))
        except ValueError as error:
            lines.append(f"{title:28} {'-':>6} {error}")
    return "\n".join(lines)


def _row(title: str, plan: ParallelPlan, found: ParallelPlan) -> str:
    ratio = plan.predicted_seconds / found.predicted_seconds
    held = bytes_text(max(stage.peak_bytes for stage in plan.stages))
    return f"{title:28} {len(plan.stages):6d} {seconds_text(plan.predicted_seconds):>10} {ratio:10.2f} {held:>11}"
