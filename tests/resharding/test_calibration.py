"""Calibration: exact on the model's own clock, the same on every rank of real processes, true on shaped links."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

import torch_xmesh as xm
from torch_xmesh import calibration
from torch_xmesh.calibration import Clock, Probe, Timing, calibrate, link_costs, measure_costs, nic_rates
from torch_xmesh.spec import mesh_grid
from torch_xmesh.testing import spawn
from torch_xmesh.testing.cluster import EmulatedCluster

CALL_S = 0.7e-3  # what a call costs beside its messages
DEVICES = 2


def hosts_of(num_hosts: int) -> dict[int, list[int]]:
    return {host: list(range(host * DEVICES, (host + 1) * DEVICES)) for host in range(num_hosts)}


def links_of(megabytes_per_s: Sequence[int]) -> xm.Topology:
    """The truth: hosts of these rates, every cost another one."""
    return xm.Topology(
        {rank: host for host, ranks in hosts_of(len(megabytes_per_s)).items() for rank in ranks},
        nic_of_host={host: rate * 1_000_000 for host, rate in enumerate(megabytes_per_s)},
        local_bytes_per_s=3_000_000_000,
        latency_us=37.0,
        message_us=4.5,
        local_latency_us=6.5,
    )


def clock_of(truth: xm.Topology, message_cpu_s: float = 0.0) -> Clock:
    """A clock that shows what the event simulator says, and the cost of a call; of a rank's CPU, that of the messages
    that it passes on, and of the call."""

    def clock(probes: Sequence[Probe], factor: int) -> list[Timing]:
        plans = [
            xm.plan_resharding(list(m.sources), m.mesh, m.placements, strategy=m.strategy, topology=truth)
            for m in probes
        ]
        return [
            Timing(
                CALL_S + plan.predicted_seconds,
                CALL_S + message_cpu_s * plan.num_messages / len(mesh_grid(probe.mesh).ranks),
            )
            for plan, probe in zip(plans, probes, strict=True)
        ]

    return clock


@pytest.mark.parametrize(
    "rates",
    [
        (100, 100, 100, 100, 100),
        (60, 100, 60),  # a fast host between slow ones
        (50, 80),
        (100, 1, 100, 1),
        (1, 100, 100),
        (1, 10, 100, 1000, 1000),
        (200, 150, 100, 50, 25, 10, 300),
    ],
)
def test_rates_of_single_hosts_are_found(rates: tuple[int, ...]) -> None:
    found = nic_rates(hosts_of(len(rates)), clock_of(links_of(rates)), 32 << 20)
    assert list(found) == list(range(len(rates)))
    for host, rate in enumerate(rates):
        visible = 1e6 * min(rate, sum(rates) - rate)
        assert 0.88 * visible <= found[host] <= 1.01 * visible, f"host {host}"


def test_one_host_has_no_rate() -> None:
    assert nic_rates(hosts_of(1), clock_of(links_of([100])), 1 << 20) == {}


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 12])
def test_costs_do_not_contain_the_calls(num_hosts: int) -> None:
    costs = link_costs(hosts_of(num_hosts), clock_of(links_of([1000] * num_hosts)), 128 << 20)
    assert costs["local_bytes_per_s"] == pytest.approx(3e9, rel=1e-3)
    assert costs["local_latency_us"] == pytest.approx(6.5, abs=0.1)
    assert ("latency_us" in costs) == ("message_us" in costs) == (num_hosts > 1)
    if num_hosts > 1:
        assert costs["latency_us"] == pytest.approx(37.0, abs=0.1)
        assert costs["message_us"] == pytest.approx(4.5, abs=0.1)


@pytest.mark.parametrize("num_hosts", [2, 5])
def test_a_message_costs_no_less_than_the_rank_that_passes_it_on_computes(num_hosts: int) -> None:
    clock = clock_of(links_of([1000] * num_hosts), message_cpu_s=20e-6)
    assert link_costs(hosts_of(num_hosts), clock, 128 << 20)["message_us"] == pytest.approx(20.0, abs=0.1)


def join(rank: int) -> None:
    """Ranks 0 and 1 on host 0, each further one on a host of its own."""
    os.environ["XMESH_HOST_ID"] = f"host{max(rank - 1, 0)}"
    dist.init_process_group("xmesh")


def measure(rank: int, world_size: int) -> str:
    join(rank)
    topology = calibrate(num_bytes=1 << 20, repeats=1)
    spec = xm.Spec((1 << 20,), torch.uint8, xm.Mesh([0]), (Replicate(),))
    for target in (1, 2):
        plan = xm.plan_resharding(spec, xm.Mesh([target]), (Replicate(),), topology=topology)
        assert plan.predicted_seconds > 0
    return topology.to_json()


def test_every_rank_measures_the_same() -> None:
    texts = spawn(measure, 4, backend=None)
    assert len(set(texts)) == 1
    topology = xm.Topology.from_json(texts[0])
    assert topology.links.is_measured
    assert topology.links.local_bytes_per_s > 0
    assert topology.links.nic_bytes_per_s > 0
    assert topology.to_core([]).host_of == {0: 0, 1: 0, 2: 1, 3: 2}


class CallsOnly:
    """A clock on which nothing but calls of reshard_many takes time, and each one the same; in place of `time`."""

    def __init__(self, call_s: float) -> None:
        self.call_s, self.now = call_s, 0.0

    def perf_counter(self) -> float:
        return self.now

    process_time = perf_counter

    def reshard_many(self, *args: Any, **kwargs: Any) -> Any:
        self.now += self.call_s
        return xm.reshard_many(*args, **kwargs)


def measure_calls_only(rank: int, world_size: int, call_s: float) -> dict[str, float]:
    join(rank)
    clock = CallsOnly(call_s)
    vars(calibration).update(time=clock, reshard_many=clock.reshard_many)
    return measure_costs(num_bytes=1 << 20, repeats=1)


def test_a_call_that_costs_much_adds_nothing_to_a_hop() -> None:
    call_s = 0.125
    costs = spawn(measure_calls_only, 4, call_s, backend=None)[0]
    bytes_per_s = int((1 << 20) / call_s)  # all that is left of them
    assert costs == {"latency_us": 0, "message_us": 0, "local_latency_us": 0, "local_bytes_per_s": bytes_per_s}


@pytest.mark.in_turn(2)
def test_shaped_links_are_measured_as_they_are(tmp_path: Path) -> None:
    megabits = {0: 120, 1: 200, 2: 120}  # the fast one is slower than both others together
    rate_of = {host: f"{rate}mbit" for host, rate in megabits.items()}
    with EmulatedCluster(hosts=3, devices=1, rate_of=rate_of) as cluster:
        if not cluster.is_shaped:
            pytest.skip(f"runs on Linux as root, with iproute2 (network namespaces): {cluster.unshaped_reason}")
        path = tmp_path / "topology.json"
        command = ["-m", "torch_xmesh", "calibrate", "--out", str(path), "--num-bytes", str(4 << 20)]
        job = cluster.run(*command, timeout=150)
        assert job.exit_codes == [0, 0, 0], [handle.output for handle in job.ranks]
    core = xm.Topology.load(path).to_core([])
    for host, rate in megabits.items():
        found = core.nic_of_host.get(host, core.links.nic_bytes_per_s)
        assert found == pytest.approx(rate * 1e6 / 8, rel=0.15), f"host {host}"
