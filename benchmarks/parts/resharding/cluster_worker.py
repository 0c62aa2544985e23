"""One rank of a measurement: runs every case under every strategy, alternating run by run, and checks every element of
every run.

Started by cluster_suite on each device with one argument, the path of a job description; rank 0 writes one JSON line
per record.
"""

import contextlib
import json
import os
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parts.resharding.cases import Case
from parts.resharding.methods import Method, RankData, XmeshMethod
from parts.resharding.overlaps import bound_seconds
from parts.resharding.records import Record
from parts.resharding.rivals import is_rival, make_rival
from parts.resharding.run_budget import Cost, further_runs, shares
from parts.shared.disturbance import ATTEMPTS, DISTURBED, StolenTime
from parts.shared.harness import job_of_arguments, publish
from parts.shared.progress import tell

_CHECKED_BYTES_PER_S = 1e9  # about what a run costs besides its transfers
# Longer than ranks take to come out of a collective one after another.
_START_IN_SECONDS = 0.05


@dataclass(frozen=True)
class Run:
    """What one run of one method gave; equal on all ranks."""

    seconds: float
    cpu_seconds: float
    stolen: float
    wrong: int


@dataclass
class Samples:
    """The runs of one method that count, and the wrong elements of all."""

    runs: list[Run] = field(default_factory=list)
    wrong: int = 0

    def median(self, figure: str) -> float:
        return float(statistics.median(getattr(run, figure) for run in self.runs))


class Worker:
    """This rank's groups and the job. Every method is collective: all ranks of the cluster call it in the same
    order."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._rank = int(os.environ["RANK"])
        self._has_product = not all(is_rival(name) for name in job["strategies"])
        options = self._options()
        dist.init_process_group("xmesh" if self._has_product else "gloo", **options)
        self._gloo: dist.ProcessGroup = dist.new_group(backend="gloo")
        self._topology = self._make_topology() if self._has_product else None
        self._deadline = float(job["deadline"])

    def _options(self) -> dict[str, Any]:
        """Options of the process group: with those of the product's backend, unless only rivals are measured."""
        options: dict[str, Any] = {"timeout": timedelta(seconds=self._job["timeout_seconds"])}
        if self._has_product:
            import torch_xmesh as xm

            options["pg_options"] = xm.Options()
            options["pg_options"].shared_memory = self._job["shared_memory"]
        return options

    @contextlib.contextmanager
    def _group_of_a_case(self) -> Iterator[dist.ProcessGroup | None]:
        """Connections of the case's own: TCP lets those that earlier cases congested keep more on the way."""
        group: dist.ProcessGroup | None = (
            dist.new_group(backend="xmesh", **self._options()) if self._has_product else None
        )
        yield group
        if group is not None:
            dist.destroy_process_group(group)

    def _make_topology(self) -> Any:
        import torch_xmesh as xm

        job = self._job
        host_of = {rank: rank // job["devices"] for rank in range(dist.get_world_size())}
        rates = {host: int(rate) for host, rate in enumerate(job["nic_bytes_per_s"])}
        usual = statistics.mode(rates.values())
        special = {host: rate for host, rate in rates.items() if rate != usual}
        costs = job["costs"] or self._measure_costs()
        return xm.Topology(
            host_of=host_of, nic_bytes_per_s=usual, nic_of_host=special, is_measured=job["is_paced"], **costs
        )

    def _measure_costs(self) -> dict[str, float]:
        """What a byte inside a host and a message cost, as a user's calibration finds them."""
        from torch_xmesh.calibration import measure_costs

        costs = measure_costs()
        if self._rank == 0:
            print(f"costs: {json.dumps(costs)}", flush=True)
        return costs

    def close(self) -> None:
        dist.destroy_process_group()

    def measure(self, case: Case, left_share: float) -> list[Record]:
        """Records of one case, which may take `left_share` of the time that is left. Every method runs once; if it gets
        a further run, that first one does not count."""
        torch.manual_seed(0)
        now = self._now()
        deadline = now + (self._deadline - now) * left_share
        with self._group_of_a_case() as group:
            data = RankData.make(case, self._rank)
            made = {name: self._make(name, data, group) for name in self._job["strategies"]}
            methods = {name: method for name, method in made.items() if method is not None}
            samples = self._measure_methods(data, methods, deadline)
            for method in methods.values():
                method.close()
        return [self._record(case, name, methods[name], samples[name]) for name in methods]

    def _measure_methods(self, data: RankData, methods: dict[str, Method], deadline: float) -> dict[str, Samples]:
        """The methods' runs, alternating."""
        samples = {name: Samples() for name in methods}
        first: dict[str, Run] = {}
        costs: dict[str, Cost] = {}
        now = self._now()
        for name, method in methods.items():
            self._tell(data, name, "first run")
            first[name] = self._run_once(data, method, samples[name])
            began, now = now, self._now()
            costs[name] = Cost(first[name].seconds, now - began)
        wanted = int(self._job["runs"])
        for done in range(wanted):
            runs = further_runs(costs, wanted - done, deadline - self._now())
            for name, method in methods.items():
                if runs[name] > 0:
                    self._tell(data, name, f"run {done + 1} of {wanted}")
                    samples[name].runs.append(self._run_undisturbed(data, method, samples[name], deadline))
        for name in methods:
            samples[name].runs = samples[name].runs or [first[name]]
        return samples

    def _tell(self, data: RankData, name: str, run: str) -> None:
        if self._rank == 0:
            tell(data.case.name, name, run, self._deadline - time.monotonic())

    def _make(self, name: str, data: RankData, group: dist.ProcessGroup | None) -> Method | None:
        """The method, or None (said once) where the product cannot plan the case with it."""
        if is_rival(name):
            return make_rival(name, data, self._gloo)
        try:
            return XmeshMethod(data, name, self._topology, group)
        except ValueError as error:
            if self._rank == 0:
                print(f"skipped: {data.case.name} {name}: {error}", flush=True)
            return None

    def _now(self) -> float:
        """Rank 0's clock, so that all ranks decide alike."""
        now = torch.tensor([time.monotonic()], dtype=torch.float64)
        dist.broadcast(now, 0, group=self._gloo)
        return float(now)

    def _agree_on_start(self) -> float:
        """The moment at which all ranks start, on the one clock of the machine. Out of a barrier they would come one
        after another, the first of them already in the others' way."""
        start = torch.tensor([time.monotonic()], dtype=torch.float64)
        dist.all_reduce(start, dist.ReduceOp.MAX, group=self._gloo)
        return float(start) + _START_IN_SECONDS

    def _run_undisturbed(self, data: RankData, method: Method, samples: Samples, deadline: float) -> Run:
        """One run, repeated while other machines took too much of this one and there is time: the one that lost
        least."""
        tried = [self._run_once(data, method, samples)]
        while tried[-1].stolen > DISTURBED and len(tried) < ATTEMPTS and self._now() < deadline:
            tried.append(self._run_once(data, method, samples))
        return min(tried, key=lambda run: run.stolen)

    def _run_once(self, data: RankData, method: Method, samples: Samples) -> Run:
        """One reshard that all ranks start at once, its elements checked; adds the wrong ones to `samples`."""
        data.poison()
        start = self._agree_on_start()
        time.sleep(max(0.0, start - time.monotonic()))
        stolen = StolenTime()
        cpu = _cpu_seconds()
        results: Sequence[torch.Tensor] = method.run() if data.is_participant else data.outs
        end = time.monotonic()
        cpu = _cpu_seconds() - cpu
        stolen_share = stolen.share()
        wrong = data.count_wrong(results)
        mine = torch.tensor([end if data.is_participant else start, cpu, wrong, stolen_share], dtype=torch.float64)
        everyone = torch.empty(dist.get_world_size(), 4, dtype=torch.float64)
        dist.all_gather(list(everyone.unbind(0)), mine, group=self._gloo)
        run = Run(
            seconds=float(everyone[:, 0].max()) - start,
            cpu_seconds=float(everyone[:, 1].sum()),
            stolen=float(everyone[everyone[:, 0].argmax(), 3]),
            wrong=int(everyone[:, 2].sum()),
        )
        samples.wrong += run.wrong
        return run

    def _record(self, case: Case, name: str, method: Method, samples: Samples) -> Record:
        bound = _bound_seconds(self._job, case)
        seconds = samples.median("seconds")
        return Record(
            case=case.name,
            strategy=name,
            num_bytes=case.num_bytes,
            seconds=seconds,
            seconds_min=min(run.seconds for run in samples.runs),
            seconds_max=max(run.seconds for run in samples.runs),
            bound_seconds=bound,
            ratio=seconds / bound if bound >= 1e-6 else None,
            predicted_seconds=method.predicted_seconds,
            num_messages=method.num_messages,
            wrong=samples.wrong,
            runs=len(samples.runs),
            cpu_seconds=samples.median("cpu_seconds"),
            plan_strategy=method.plan_strategy,
            stolen=samples.median("stolen"),
        )


def _bound_seconds(job: dict[str, Any], case: Case) -> float:
    devices = job["devices"]
    return bound_seconds(case, lambda rank: rank // devices, job["nic_bytes_per_s"])


def _cpu_seconds() -> float:
    """User and system time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    job = job_of_arguments()
    cases = [Case.from_json(data) for data in job["cases"]]
    worker = Worker(job)
    with contextlib.closing(worker):
        weights = [_bound_seconds(job, case) + case.num_bytes / _CHECKED_BYTES_PER_S for case in cases]
        for case, share in zip(cases, shares(weights), strict=True):
            publish(job, [record.to_json() for record in worker.measure(case, share)])


if __name__ == "__main__":
    main()
