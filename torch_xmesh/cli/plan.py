"""``xmesh plan``: a reshard's plan, several of them, or a table of what each strategy would take."""

import argparse
import json
import math
import re
from typing import Any

import torch
from torch.distributed.tensor import Placement

from torch_xmesh import _C
from torch_xmesh.arguments import read_text
from torch_xmesh.plan import ReshardingPlan, plan_resharding
from torch_xmesh.spec import Mesh, Spec, placement_of
from torch_xmesh.topology import Topology

_MAX_RANKS = 1 << 20
_CASE_FIELDS = ("shape", "dtype", "src_mesh", "src", "dst_mesh", "dst")


def run(options: argparse.Namespace) -> None:
    """Raises ValueError for what is no case, and OSError for files that cannot be read."""
    cases = _cases(options)
    if options.plot is not None and len(cases) > 1:
        raise ValueError("--plot draws one case; --case-file has several")
    if options.compare and (options.json or options.plot is not None):
        raise ValueError("--compare prints one line per strategy; it goes with neither --json nor --plot")
    if options.compare:
        for name, case in cases:
            _print_comparison(name, case, options)
        return
    plans = [(name, _plan(case, options, options.strategy)) for name, case in cases]
    if options.plot is not None:
        plans[0][1].plot(options.plot)
    if options.json:
        texts = [plan.to_json() for _, plan in plans]
        print(texts[0] if options.case_file is None else "[" + ",\n".join(texts) + "]")
    else:
        for name, plan in plans:
            print(f"# {name}\n{plan}" if name else str(plan))


def _cases(options: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    given = {name: getattr(options, name) for name in _CASE_FIELDS}
    if options.case_file is None:
        return [("", _complete(given, "the command line"))]
    if beside := [name for name, value in given.items() if value is not None and name != "dtype"]:
        raise ValueError(f"--case-file describes its cases: it goes without --{beside[0].replace('_', '-')}")
    try:
        listed = json.loads(read_text(options.case_file, "cases"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{options.case_file}: not JSON: {error}") from None
    if not isinstance(listed, list) or not listed or not all(isinstance(case, dict) for case in listed):
        raise ValueError(f"{options.case_file}: expected a list of objects with {', '.join(_CASE_FIELDS)}")
    out = []
    for i, case in enumerate(listed):
        name = str(case.get("name", f"case {i}"))
        unknown = set(case) - {"name", *_CASE_FIELDS}
        if unknown:
            raise ValueError(f"{options.case_file}: {name} has the unknown field {sorted(unknown)[0]!r}")
        out.append((name, _complete({"dtype": options.dtype} | case, f"{options.case_file}: {name}")))
    return out


def _complete(case: dict[str, Any], where: str) -> dict[str, Any]:
    for name in _CASE_FIELDS:
        if case.get(name) is None:
            raise ValueError(f"{where}: --{name.replace('_', '-')} is missing")
    return case


def _plan(case: dict[str, Any], options: argparse.Namespace, strategy: str) -> ReshardingPlan:
    dtype = getattr(torch, str(case["dtype"]).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {case['dtype']!r}")
    src_mesh = parse_mesh(case["src_mesh"])
    spec = Spec(parse_shape(case["shape"]), dtype, src_mesh, parse_placements(case["src"]))
    dst_mesh = parse_mesh(case["dst_mesh"])
    return plan_resharding(
        spec, dst_mesh, parse_placements(case["dst"]), strategy=strategy, topology=_topology(options)
    )


def _topology(options: argparse.Namespace) -> Topology:
    if options.topology is not None and options.devices_per_host is not None:
        raise ValueError("--topology says which ranks share a host, so does --devices-per-host: give one of them")
    if options.topology is None and options.devices_per_host is None:
        raise ValueError("say which ranks share a host: --devices-per-host N or --topology FILE")
    if options.topology is not None:
        return Topology.load(options.topology)
    return Topology(devices_per_host=options.devices_per_host)


def _print_comparison(name: str, case: dict[str, Any], options: argparse.Namespace) -> None:
    plans = [(strategy, _plan(case, options, strategy)) for strategy in _C.strategy_names()]
    bound = plans[0][1].lower_bound_seconds
    print(f"# {name or 'all strategies'}: lower bound {plans[0][1].lower_bound_bytes} bytes per NIC, {bound:.6g} s")
    print(f"{'strategy':<24} {'predicted s':>12} {'/ bound':>8} {'messages':>9}")
    for strategy, plan in plans:
        ratio = "       -" if plan.bound_ratio is None else f"{plan.bound_ratio:8.3f}"
        print(f"{strategy:<24} {plan.predicted_seconds:12.6g} {ratio} {plan.num_messages:9d}")


def parse_shape(text: Any) -> list[int]:
    """Reads ``1024,1024,512``, or a list of integers. Raises ValueError."""
    parts = text if isinstance(text, list) else [part for part in str(text).split(",") if part.strip()]
    try:
        return [int(part) for part in parts]
    except (TypeError, ValueError):
        raise ValueError(f"shape {text!r}: expected integers separated by commas") from None


def parse_mesh(text: Any) -> Mesh:
    """Reads ``3x4@8``, consecutive ranks from 8 on; or nested lists of ranks, also as JSON. Raises ValueError."""
    if isinstance(text, list):
        return Mesh(text)
    match = re.fullmatch(r"\s*(\d+(?:x\d+)*)(?:@(\d+))?\s*", str(text))
    if match is None:
        try:
            return Mesh(json.loads(text))
        except json.JSONDecodeError:
            raise ValueError(
                f"mesh {text!r}: expected ROWSxCOLUMNS@FIRST_RANK such as 2x4@8, or JSON such as [[0,1]]"
            ) from None
    shape = [int(extent) for extent in match.group(1).split("x")]
    count = math.prod(shape)
    if not 0 < count <= _MAX_RANKS:
        raise ValueError(f"mesh {text!r} has {count} ranks, expected 1 to {_MAX_RANKS}")
    first = int(match.group(2) or 0)
    return Mesh(torch.arange(first, first + count, device="cpu").reshape(shape))


def parse_placements(text: Any) -> list[Placement]:
    """Reads ``Replicate(),Shard(1)``, or a list of such texts. Raises ValueError."""
    parts = text if isinstance(text, list) else [part for part in re.split(r",(?![^(]*\))", str(text)) if part.strip()]
    out = []
    for part in parts:
        spelled = re.sub(r"[\s'\"]|dim=|sf=|split_factor=", "", str(part))
        spelled = re.sub(r"^S\((-?\d+)\)$", r"Shard(\1)", spelled).replace("R()", "R")
        if not re.fullmatch(r"R|Replicate\(\)|S\d+|Shard\(-?\d+\)|_?StridedShard\(-?\d+,\d+\)|Partial\(\w*\)", spelled):
            raise ValueError(
                f"placement {part!r}: expected Replicate(), Shard(dim), StridedShard(dim,split_factor) or Partial(op)"
            )
        spelled = re.sub(r"^R$", "Replicate()", re.sub(r"^S(\d+)$", r"Shard(\1)", spelled))
        spelled = spelled.removeprefix("_").replace("Partial()", "Partial(sum)")
        out.append(placement_of(spelled))
    return out
