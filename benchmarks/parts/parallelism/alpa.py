"""Plans for the models of Alpa's evaluation on its cluster, and what they are predicted to reach.

L. Zheng et al., Alpa, OSDI 2022: section 8.1, Tables 4 and 6 to 8. The paper's throughputs are a picture (Figure 7)
without numbers; its text has two shares of linear scaling, and says something of two plans for Wide-ResNet.
"""

import itertools
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import torch_xmesh as xm
from parts.parallelism.alpa_models import gpt, moe, wide_resnet
from parts.parallelism.cluster import (
    DEVICES_PER_HOST,
    GIB,
    MEMORY_BYTES,
    devices_of,
    half_precision,
    network,
    single_precision,
)
from parts.parallelism.speed import Stopwatch, one_core
from parts.shared.charts import INCHES, new_figure, save_figure
from torch_xmesh.parallelism.plan import PlannedStage
from torch_xmesh.parallelism.plan_text import parallelism_of

ALPA_HEAD = (
    ("family", ""),
    ("model", ""),
    ("GPUs", ""),
    ("batch", "/micro"),
    ("search", "(s)"),
    ("step", "(s)"),
    ("predicted", "(PFLOPS)"),
    ("each GPU", "(TFLOPS)"),
    ("scaling", "(%)"),
    ("Alpa's", "(%)"),
    ("peak", "(GiB)"),
)
_BACKWARD_AND_FORWARD = 3
"""Operations of both over those of forward."""
_COLORS = {"gpt-3": "#4477aa", "moe": "#aa3377", "wide-resnet": "#228833"}


@dataclass(frozen=True)
class AlpaCase:
    """A model on so many GPUs.

    Attributes:
        make: the model.
        sample: shape and dtype of one of its inputs.
        batch: samples of a step.
        microbatches: samples of a microbatch that are tried: the paper, too, takes the best.
        scaling: what the paper's text says: of linear scaling, the part that is reached.
        account: what it says of the plan.
    """

    family: str
    model: str
    num_devices: int
    make: Callable[[], nn.Module]
    sample: tuple[tuple[int, ...], torch.dtype]
    batch: int
    microbatches: tuple[int, ...]
    compute: xm.Compute
    scaling: float | None = None
    account: str | None = None

    @property
    def name(self) -> str:
        return f"{self.family}-{self.model.lower()}"


def _language(family: str, model: str, num_devices: int, make: Callable[[], nn.Module], **more: Any) -> AlpaCase:
    return AlpaCase(family, model, num_devices, make, ((1024,), torch.int64), 1024, (4, 8), half_precision(), **more)


def _images(model: str, num_devices: int, make: Callable[[], nn.Module], **more: Any) -> AlpaCase:
    sample = ((3, 224, 224), torch.float32)
    return AlpaCase("wide-resnet", model, num_devices, make, sample, 1536, (16, 32, 64), single_precision(), **more)


ALPA_CASES = (
    _language("gpt-3", "350M", 1, partial(gpt, 24, 1024, 16)),
    _language("gpt-3", "1.3B", 4, partial(gpt, 24, 2048, 32)),
    _language("gpt-3", "2.6B", 8, partial(gpt, 32, 2560, 32)),
    _language("gpt-3", "6.7B", 16, partial(gpt, 32, 4096, 32)),
    _language("gpt-3", "15B", 32, partial(gpt, 48, 5120, 32)),
    _language("gpt-3", "39B", 64, partial(gpt, 48, 8192, 64)),
    _language("moe", "380M", 1, partial(moe, 8, 768, 16, 8)),
    _language("moe", "1.3B", 4, partial(moe, 16, 768, 16, 16)),
    _language("moe", "2.4B", 8, partial(moe, 16, 1024, 16, 16)),
    _language("moe", "10B", 16, partial(moe, 16, 1536, 16, 32), scaling=1.0),
    _language("moe", "27B", 32, partial(moe, 16, 2048, 32, 48)),
    _language("moe", "70B", 64, partial(moe, 32, 2048, 32, 64)),
    _images("250M", 1, partial(wide_resnet, 50, 160, 2)),
    _images(
        "1B",
        4,
        partial(wide_resnet, 50, 320, 2),
        account="no pipeline; the batch axis is partitioned in the first dozens of layers, the channel axis in the "
        "last few",
    ),
    _images("2B", 8, partial(wide_resnet, 50, 448, 2)),
    _images(
        "4B",
        16,
        partial(wide_resnet, 50, 640, 2),
        account="3 stages on 4, 4 and 8 GPUs; data parallelism is preferred in the first two, in the third the "
        "convolutions are partitioned in a non-trivial way",
    ),
    _images("6.8B", 32, partial(wide_resnet, 50, 320, 16), scaling=0.8),
    _images("13B", 64, partial(wide_resnet, 101, 320, 16)),
)


@dataclass(frozen=True)
class AlpaRecord:
    """What was found for a model and a size of microbatch, or why nothing was (`error`).

    Attributes:
        petaflops: of all GPUs: operations of forward and backward, none of them twice, over the step.
        scaling: `petaflops` over as many times those of the family's model on one GPU; None where that was not planned.
        stages: GPUs of each, and what its layers do, in runs of layers that do the same: (what, number of layers).
        is_best: the fastest of the sizes of microbatch.
    """

    family: str
    model: str
    num_devices: int
    num_parameters: int
    microbatch: int
    num_microbatches: int
    paper_scaling: float | None
    search_seconds: float | None = None
    step_seconds: float | None = None
    petaflops: float | None = None
    scaling: float | None = None
    schedule: str | None = None
    peak_bytes: int | None = None
    stages: tuple[tuple[int, tuple[tuple[str, int], ...]], ...] = ()
    error: str | None = None
    is_best: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def planned(case: AlpaCase, microbatch: int) -> AlpaRecord:
    """Looks for the plan of one size of microbatch."""
    model, (shape, dtype) = case.make(), case.sample
    example = torch.zeros((microbatch, *shape), dtype=dtype, device="meta")
    record = _empty(case, microbatch, sum(one.numel() for one in model.parameters()))
    per_host = min(case.num_devices, DEVICES_PER_HOST)
    watch = Stopwatch()
    try:
        plan = xm.plan_parallel(
            model,
            (example,),
            devices=devices_of(case.num_devices // per_host, per_host),
            num_microbatches=record.num_microbatches,
            memory_limit_bytes=MEMORY_BYTES,
            compute=case.compute,
            topology=network(per_host),
        )
    except ValueError as error:
        return replace(record, error=str(error), search_seconds=watch.seconds()[0])
    seconds, _ = watch.seconds()
    num_flops = _BACKWARD_AND_FORWARD * record.num_microbatches * _forward_flops(model, example)
    return replace(
        record,
        search_seconds=seconds,
        step_seconds=plan.predicted_seconds,
        petaflops=num_flops / plan.predicted_seconds / 1e15,
        schedule=plan.schedule,
        peak_bytes=max(stage.peak_bytes for stage in plan.stages),
        stages=tuple((len(stage.ranks), _runs(stage)) for stage in plan.stages),
    )


def _empty(case: AlpaCase, microbatch: int, num_parameters: int) -> AlpaRecord:
    return AlpaRecord(
        family=case.family,
        model=case.model,
        num_devices=case.num_devices,
        num_parameters=num_parameters,
        microbatch=microbatch,
        num_microbatches=case.batch // microbatch,
        paper_scaling=case.scaling,
    )


def _forward_flops(model: nn.Module, example: torch.Tensor) -> int:
    """FLOPs of one forward, matrix products and convolutions alone, as torch's FlopCounterMode counts them."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(example)
    return int(counter.get_total_flops())


def _runs(stage: PlannedStage) -> tuple[tuple[str, int], ...]:
    words = [parallelism_of(stage, layer) for layer in range(*stage.layers)]
    return tuple((word, len(list(same))) for word, same in itertools.groupby(words))


def _search(connection: Connection, case: AlpaCase, microbatch: int) -> None:
    with one_core():
        connection.send(planned(case, microbatch))


def planned_within(case: AlpaCase, microbatch: int, seconds: float) -> AlpaRecord:
    """The same in a process of its own, on one core, which ends after so many seconds of the clock."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_search, args=(sending, case, microbatch), daemon=True)
    process.start()
    sending.close()
    try:
        if receiving.poll(seconds):
            record: AlpaRecord = receiving.recv()
            return record
        error = f"no plan after {seconds:g} s"
    except EOFError:
        process.join()
        error = f"the search ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
        receiving.close()
    num_parameters = sum(one.numel() for one in case.make().parameters())
    return replace(_empty(case, microbatch, num_parameters), error=error)


def measure_alpa(
    cases: Sequence[AlpaCase], seconds: float, say: Callable[[str], None], only: Sequence[int] | None = None
) -> Iterator[list[AlpaRecord]]:
    """The records of each case. `only`: these sizes of microbatch instead of the case's own. Once a search of a case is
    given up, its other sizes are not tried."""
    alone: dict[str, float] = {}
    for case in cases:
        found = []
        for microbatch in only or case.microbatches:
            say(f"{case.name} on {case.num_devices} GPUs, {microbatch} samples a microbatch")
            found.append(planned_within(case, microbatch, seconds))
            if found[-1].error is not None and found[-1].search_seconds is None:
                break
        best = max(range(len(found)), key=lambda number: found[number].petaflops or 0.0)
        if case.num_devices == 1 and found[best].petaflops is not None:
            alone[case.family] = found[best].petaflops or 0.0
        yield [
            replace(one, is_best=number == best, scaling=_scaling(one, alone.get(case.family)))
            for number, one in enumerate(found)
        ]


def _scaling(record: AlpaRecord, alone: float | None) -> float | None:
    return None if record.petaflops is None or not alone else record.petaflops / record.num_devices / alone


def alpa_row(record: AlpaRecord) -> list[str]:
    """As the table shows it."""
    each = None if record.petaflops is None else record.petaflops * 1e3 / record.num_devices
    return [
        record.family,
        record.model,
        str(record.num_devices),
        str(record.microbatch),
        _number(record.search_seconds, 1),
        _number(record.step_seconds, 2),
        _number(record.petaflops, 3),
        _number(each, 1),
        _number(record.scaling, 0, 100),
        _number(record.paper_scaling, 0, 100),
        _number(record.peak_bytes, 1, 1 / GIB),
    ]


def _number(value: float | None, digits: int, factor: float = 1.0) -> str:
    return "" if value is None else f"{value * factor:.{digits}f}"


def plan_line(record: AlpaRecord) -> str:
    """The plan in a line: stages that follow one another and do mostly the same are counted."""
    if record.error is not None:
        return f"not planned: {record.error.splitlines()[0]}"
    alike = [(num_devices, _mostly(runs)) for num_devices, runs in record.stages]
    groups = [(one, len(list(same))) for one, same in itertools.groupby(alike)]
    parts = [
        f"{f'{count} x ' if count > 1 else ''}{num_devices} GPU{'s' if num_devices > 1 else ''} [{words}]"
        for (num_devices, words), count in groups
    ]
    return f"{len(alike)} stage{'s' if len(alike) > 1 else ''}, {record.schedule}: {', '.join(parts)}"


def _mostly(runs: Sequence[tuple[str, int]]) -> str:
    """What most of the layers do."""
    counted: Counter[str] = Counter()
    for words, num_layers in runs:
        counted[words] += num_layers
    return counted.most_common(1)[0][0]


def account_lines(cases: Sequence[AlpaCase], records: Sequence[AlpaRecord]) -> list[str]:
    """The plans of which the paper says something, beside that."""
    lines = []
    for case in cases:
        mine = [one for one in records if one.is_best and (one.family, one.model) == (case.family, case.model)]
        if case.account is None or not mine:
            continue
        lines += [f"{case.family} {case.model} on {case.num_devices} GPUs", f"  Alpa: {case.account}"]
        lines.append(f"  here: {plan_line(mine[0])}")
        for number, (num_devices, runs) in enumerate(mine[0].stages):
            each = "; ".join(f"{num_layers} x [{words}]" for words, num_layers in runs)
            lines.append(f"    stage {number} on {num_devices}, layers in order: {each}")
    return lines


def plot_alpa(path: Path, records: Sequence[AlpaRecord]) -> None:
    """Predicted throughput over GPUs beside linear scaling, and the part of that which is reached, with the paper's."""
    best = [one for one in records if one.is_best]
    figure = new_figure(INCHES, 4.0)
    throughput, scaling = figure.subplots(1, 2)
    for family, color in _COLORS.items():
        mine = [one for one in best if one.family == family and one.petaflops is not None]
        devices = [one.num_devices for one in mine]
        throughput.plot(devices, [one.petaflops for one in mine], "o-", color=color, ms=4, label=family)
        if mine and mine[0].petaflops is not None:
            linear = [count * mine[0].petaflops / devices[0] for count in devices]
            throughput.plot(devices, linear, ":", color=color, lw=1)
        reached = [(one.num_devices, 100 * one.scaling) for one in mine if one.scaling is not None]
        scaling.plot([x for x, _ in reached], [y for _, y in reached], "o-", color=color, ms=4)
        paper = [
            (one.num_devices, 100 * one.paper_scaling) for one in best if one.family == family and one.paper_scaling
        ]
        scaling.plot([x for x, _ in paper], [y for _, y in paper], "s", color=color, ms=9, mfc="none", mew=1.6)
    scaling.plot([], [], "s", color="#555555", ms=9, mfc="none", mew=1.6, label="Alpa, measured")
    throughput.plot([], [], ":", color="#555555", lw=1, label="linear")
    throughput.set_yscale("log")
    throughput.set_ylabel("predicted, PFLOPS")
    scaling.set_ylabel("of linear scaling, %")
    scaling.set_ylim(0, 125)
    for axes in (throughput, scaling):
        ticks = sorted({one.num_devices for one in best})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("GPUs (the model grows with them)")
        axes.legend(fontsize=8, frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    save_figure(figure, path)
