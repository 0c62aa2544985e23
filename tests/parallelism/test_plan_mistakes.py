"""What automatic plans refuse: arguments of plan_parallel and of presets, clusters that contradict themselves, and all
fields of a plan's JSON."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_models import Mlp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import torch_xmesh as xm

X = torch.zeros(8, 16)
MODEL = Mlp(16, 4)
RATES = xm.Compute(flops=1e11, bytes_per_s=1e10)
ROWS = xm.Mesh([[0, 1], [2, 3]])
FLAT = xm.Mesh(range(4))
HOSTS = xm.Topology(devices_per_host=2, nic_bytes_per_s=10**8)


def planned(**more: Any) -> xm.ParallelPlan:
    options: dict[str, Any] = {"devices": ROWS, "num_microbatches": 4, "compute": RATES, "topology": HOSTS, **more}
    model, args = options.pop("model", MODEL), options.pop("example_args", (X,))
    return xm.plan_parallel(model, args, **options)


CLUSTERS: dict[str, tuple[dict[str, Any], str]] = {
    "a number": ({"devices": 4}, r"one or two axes .*, got 4 \(int\): xm.Mesh\(range\(n\)\) is n devices"),
    "a number as a mesh": ({"devices": xm.Mesh(4)}, r"one or two axes .*, got 0: Mesh\(4\)"),
    "three axes": ({"devices": xm.Mesh([[[0, 1], [2, 3]]])}, r"one or two axes .*, got 3: Mesh\("),
    "no ranks": ({"devices": xm.Mesh(torch.zeros(0, dtype=torch.int64))}, r"one or two axes .*, got one without ranks"),
    "text": ({"devices": "2x2"}, "a mesh is an array of integers, got '2x2'"),
    "a rank twice": ({"devices": [0, 0]}, "the ranks of a mesh are distinct"),
    "a row on two hosts": (
        {"topology": xm.Topology({0: 0, 1: 1, 2: 0, 3: 1})},
        r"row 0 of devices \(ranks \[0, 1\]\) is one host, the topology has it on hosts \[0, 1\]",
    ),
    "rows on one host": (
        {"topology": xm.Topology(devices_per_host=4)},
        r"row 1 of devices \(ranks \[2, 3\]\) is a host of its own, the topology has it on host 0, as row 0",
    ),
    "a rank without a host": ({"topology": xm.Topology({0: 0, 1: 0, 2: 1})}, "names no host for rank 3"),
    "a rate of no host": (
        {"topology": xm.Topology(nic_of_host={2: 10**8})},
        r"nic_of_host says something of host 2: the devices are on hosts \[0, 1\]",
    ),
    "no topology": ({"topology": {0: 0}}, r"topology must be an xm.Topology, got \{0: 0\} \(dict\)"),
    "compute of no host": ({"compute": {0: RATES, 1: RATES, 2: RATES}}, r"compute says something of host 2"),
    "compute of a host as text": ({"compute": {"0": RATES, "1": RATES}}, r"compute says something of host '0'"),
    "compute of too few": ({"compute": {0: RATES}}, r"compute says nothing of host 1: it has 0"),
    "compute of nothing": ({"compute": {0: RATES, 1: None}}, r"compute is an xm.Compute, or .* got None \(NoneType\)"),
    "a number for compute": ({"compute": 1e12}, r"compute is an xm.Compute, or one by host, got 1000000000000.0"),
    "memory of no host": (
        {"memory_limit_bytes": {0: 10**9, 1: 10**9, 3: 10**9}},
        r"memory_limit_bytes says something of host 3",
    ),
    "memory as a float": (
        {"memory_limit_bytes": 1e9},
        r"memory_limit_bytes is a positive int or None, got 1000000000.0",
    ),
}


@pytest.mark.parametrize("what", CLUSTERS)
def test_odd_clusters(what: str) -> None:
    """By plan_parallel and presets alike."""
    options, text = CLUSTERS[what]
    with pytest.raises(ValueError, match=text):
        planned(**options)
    usual: dict[str, Any] = {"devices": ROWS, "num_microbatches": 4, "compute": RATES, "topology": HOSTS}
    with pytest.raises(ValueError, match=text):
        xm.presets.data_parallel(MODEL, (X,), **usual | options)


def test_clusters_that_are_not_odd() -> None:
    """Hosts of any number and order; a mesh of one axis over hosts; a topology of more hosts than are used."""
    wide = xm.Topology({0: 7, 1: 7, 2: 3, 3: 3, 4: 1}, nic_of_host={1: 10**6})
    plans = [
        planned(devices=devices, topology=topology)
        for devices in (ROWS, FLAT, [[0, 1], [2, 3]])
        for topology in (wide, xm.Topology(devices_per_host=2), None)
        if devices is not FLAT or topology is not None
    ]
    assert {plan.devices for plan in plans} == {4}
    assert planned(devices=FLAT, topology=xm.Topology({0: 0, 1: 1, 2: 0, 3: 1})).devices == 4


def test_devices_of_a_device_mesh_on_cpu_are_cpus() -> None:
    """Whose collectives are gloo's."""
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), _init_backend=False, _rank=0)
    assert planned(devices=mesh).collectives == "gloo"
    assert planned().collectives == "ring"


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "microbatches": ({"num_microbatches": 2.0}, "num_microbatches must be a positive int, got 2.0"),
    "no microbatches": ({"num_microbatches": True}, "num_microbatches must be a positive int, got True"),
    "no layers": ({"num_layers": 0}, "num_layers must be a positive int, got 0"),
    "layers": ({"num_layers": 2.5}, "num_layers must be a positive int, got 2.5"),
    "too many layers": ({"num_layers": 1000}, "1000"),
    "model": ({"model": Mlp}, r"model is an nn.Module, got .* \(type\)"),
    "loss": ({"loss_fn": 3}, r"loss_fn is a function or None, got 3 \(int\)"),
    "arguments": ({"example_args": X}, r"example_args is a tuple .*, got Tensor: pass \(x,\)"),
    "named arguments": ({"example_kwargs": [X]}, "example_kwargs is a dict of keyword arguments or None, got list"),
    "schedule": ({"schedule": 3}, "a schedule is a name"),
    "seconds": ({"max_seconds": float("nan")}, "max_seconds is a positive number or None, got nan"),
    "collectives": ({"collectives": None}, "no cost model of collectives named None"),
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_arguments(what: str) -> None:
    options, text = ARGUMENTS[what]
    with pytest.raises(ValueError, match=text):
        planned(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_stages": 2, "zero": 1}, r"zero is 0, 2 or 3 \(a level of ZeRO that presets have\), got 1"),
        ({"num_stages": 2, "zero": True}, "zero is 0, 2 or 3 .*, got True"),
        ({"num_stages": 2, "zero": 4}, "zero is 0, 2 or 3 .*, got 4"),
        ({"num_stages": 2, "zero": 2.0}, "zero is 0, 2 or 3 .*, got 2.0"),
        ({"num_stages": 0}, "num_stages must be a positive int, got 0"),
        ({"num_stages": 2.0}, "num_stages must be a positive int, got 2.0"),
        ({"num_stages": 2, "tensor_parallel": 0}, "tensor_parallel must be a positive int, got 0"),
        ({"num_stages": 2, "tensor_parallel": -1}, "tensor_parallel must be a positive int, got -1"),
        ({"num_stages": 2, "tensor_parallel": True}, "tensor_parallel must be a positive int, got True"),
        ({"num_stages": 2, "tensor_parallel": 4}, "4 devices in 2 stages of 4 x n devices each"),
    ],
)
def test_presets(options: dict[str, Any], text: str) -> None:
    usual: dict[str, Any] = {"devices": ROWS, "num_microbatches": 4, "compute": RATES, "topology": HOSTS}
    with pytest.raises(ValueError, match=text):
        xm.presets.pipeline(MODEL, (X,), **usual, **options)
    if "tensor_parallel" in options and options["tensor_parallel"] < 1:
        with pytest.raises(ValueError, match=text):
            xm.presets.megatron(MODEL, (X,), tensor_parallel=options["tensor_parallel"], **usual)


def test_more_stages_than_plans_have() -> None:
    with pytest.raises(ValueError, match="a plan has at most 64 stages, got 65"):
        xm.presets.pipeline(
            Mlp(2, 65),
            (torch.zeros(1, 2),),
            devices=xm.Mesh(range(65)),
            num_microbatches=1,
            num_layers=65,
            num_stages=65,
        )


# Plans as JSON.

Path = tuple[Any, ...]


class Twice(nn.Module):
    """Layers of which the last has the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Mlp(16, 4)
        self.layers.layers[3].weight = self.layers.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def whole_plan() -> dict[str, Any]:
    """The JSON fields of a plan with two stages, a value between them, ties, collectives and parameters in parts."""
    plan = xm.presets.pipeline(
        Twice(), (X,), devices=ROWS, num_microbatches=4, compute=RATES, topology=HOSTS, num_stages=2, zero=2
    )
    fields: dict[str, Any] = json.loads(plan.to_json())
    assert fields["values"]
    assert fields["ties"]
    assert all(stage["collectives"] and stage["programs"] for stage in fields["stages"])
    assert xm.ParallelPlan.from_json(json.dumps(fields)) == plan
    return fields


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, (*path, key))
    else:
        yield path, value


def with_leaf(fields: dict[str, Any], path: Path, value: Any) -> str:
    out = copy.deepcopy(fields)
    at: Any = out
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return json.dumps(out)


def refused(text: str) -> bool:
    try:
        xm.ParallelPlan.from_json(text)
    except ValueError as error:
        return str(error).startswith("plan")
    return False


def test_no_number_of_a_plan_may_be_below_all_that_are() -> None:
    """Every int and float, one by one; floats also nan and infinite; ints also what is no int."""
    fields = whole_plan()
    for path, value in leaves(fields):
        if isinstance(value, bool | str | None) or path == ("version",):
            continue
        wrong = [-7, True, "7", None] + ([float("nan"), float("inf"), -1e-6] if isinstance(value, float) else [0.5])
        if path[-1] in ("layer", "zero_state"):
            wrong.remove(None)  # None stands for a constant's layer, or a parameter that is not in parts
        for other in wrong:
            assert refused(with_leaf(fields, path, other)), f"{path}: {other!r} for {value!r}"


def test_words_of_a_plan_are_known() -> None:
    """Those that are no names: what axes do, types, what collectives are for."""
    fields = whole_plan()
    words = 0
    for path, value in leaves(fields):
        known = ("why", "collective", "dtype", "collectives", "schedule_csv", "source", "mode")
        if path[-1] in known or "axes" in path or "within" in path:
            words += 1
            assert refused(with_leaf(fields, path, "zz")), f"{path}: zz for {value!r}"
    assert words > 15


def change(*path: Any, to: Any) -> Callable[[dict[str, Any]], str]:
    return lambda fields: with_leaf(fields, path, to)


def test_fields_of_a_plan_fit_each_other() -> None:
    fields = whole_plan()
    stage = ("stages", 0)
    operators: list[dict[str, Any]] = fields["stages"][0]["operators"]
    number = next(i for i, one in enumerate(operators) if one["is_heavy"])
    loops = dict(map(tuple, operators[number]["loops"]))
    operator, program = (*stage, "operators", number), (*stage, "programs", 0)
    parameters = fields["stages"][0]["parameters"]
    in_parts = next(i for i, one in enumerate(parameters) if len(one["shape"]) > 1)
    first, entering = operators[0]["name"], fields["stages"][0]["programs"][0]["operators"]
    cases: list[tuple[Callable[[dict[str, Any]], str], str]] = [
        (
            change(*operator, "axes", 0, to="zz"),
            rf"shard 'zz': expected one of its loops \({', '.join(loops)}\), - \+ or ~",
        ),
        (change(*program, "operators", 0, "axes", 0, to="-"), r"shards \('-',\), the plan's \('b0',\)"),
        (change(*program, "segments", to=[0, 2, 1]), r"segments begin with operators \[0, 2, 1\] of \d+"),
        (change(*program, "segments", to=[0, 999]), r"segments begin with operators \[0, 999\] of \d+"),
        (change(*program, "leaving_whole", to=[{**entering[0]["reads"][0], "value": 0}]), r"values \[.*\] leave, and"),
        (change(*program, "mode", to="training"), "programs of .*, expected of every stage one of both modes"),
        (change(*program, "values", 0, "source", to="stage"), "enters, and leaves no stage before"),
        (change(*program, "operators", 1, "reads", 0, "value", to=99), "value number 99 of"),
        (change(*program, "operators", 1, "reads", 0, "state", to=[-1]), r"operator .*: value .* forward comes as"),
        (change(*program, "operators", 1, "name", to=first), rf"operators: '{first}' is there twice"),
        (change(*program, "leaving", to=[]), "enters, and leaves no stage before"),
        (change(*stage, "parameters", in_parts, "fetch", to=[]), "what is fetched: value .* forward comes as"),
        (change(*operator, "axes", 0, to="+"), r"output 0 is held as 0 along axis 0, whose choice is '\+'"),
        (change(*operator, "axes", 0, to="-"), r"output 0 is held as 0 along axis 0, whose choice is '-'"),
        (change(*operator, "loops", 0, 1, to=7), r"loop \w+ of 7 in 2 parts"),
        (change(*stage, "operators", 1, "name", to=first), rf"operators: '{first}' is there twice"),
        (change(*stage, "parameters", 1, "name", to=parameters[0]["name"]), "is there twice"),
        (change(*stage, "parameters", in_parts, "state", to=[1]), r"parts \[0\] of what lies as \[1\]"),
        (change(*stage, "parameters", in_parts, "zero_state", to=None), "has ZeRO level 2 and parts None"),
        (change(*stage, "mesh_shape", to=[1, 1, 2]), r"2 ranks in a mesh of \[1, 1, 2\]"),
        (change(*stage, "in_flight", to=5), "in_flight: expected 1 to 4 microbatches, got 5"),
        (change(*stage, "collectives", 0, "axis", to=1), r"collectives\[0\].axis: expected one of 1, got 1"),
        (
            change(*stage, "collectives", 0, "why", to="zz"),
            "why: expected one of forward, backward, gradient, parameter",
        ),
        (change("values", 0, "dtype", to="float33"), "dtype: expected the name of a torch.dtype, got 'float33'"),
        (change("values", 0, "dst", to=[-2]), "has no dim -2"),
        (change("ties", 0, "name", to="zz"), r"plan.ties\[0\]: stage 0 has no parameter 'zz'"),
        (change("ties", 0, "stages", to=[1, 0]), r"stages \[1, 0\], expected two or more of 2, ascending"),
        (change("collectives", to="tree"), "plan.collectives: expected one of .*, got 'tree'"),
        (
            change("schedule_csv", to="0F0,0F1,0F2,0F3,1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3,0B0,0B1,0B2,0B3"),
            "1 places for 2",
        ),
        (change("step", "total", to=float("nan")), r"step.total: expected a finite number of at least 0, got nan"),
        (lambda one: json.dumps(one).replace('"devices": 4', '"devices": 4, "devices": 4'), "'devices' is there twice"),
    ]
    for make, text in cases:
        with pytest.raises(ValueError, match=text):
            xm.ParallelPlan.from_json(make(fields))
