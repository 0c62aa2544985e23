"""The reshard benchmark's options and its budget: what has no effect is refused, short time goes to the product first,
hard layouts are what their bound and plans say."""

import json
from pathlib import Path

import numpy as np
import pytest
import reshard_perf
from parts.resharding import charts, hard
from parts.resharding.cases import Case, random_case
from parts.resharding.overlaps import bound_seconds
from parts.resharding.records import Record
from parts.resharding.run_budget import Cost, further_runs, shares

from torch_xmesh.palette import colors_of

COSTS = {
    "auto": Cost(1.0, 1.5),
    "striped": Cost(1.0, 1.5),
    "broadcast": Cost(2.0, 2.5),
    "alpa": Cost(1.1, 1.5),
    "send_recv": Cost(4.0, 4.5),
    "torch_p2p": Cost(8.0, 8.5),
}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (100.0, (5, 5, 5, 5, 5, 5)),
        (61.0, (5, 5, 5, 5, 2, 2)),
        (35.0, (5, 5, 5, 5, 0, 0)),
        (32.0, (5, 5, 5, 3, 0, 0)),
        (16.0, (5, 2, 2, 0, 0, 0)),
        (-1.0, (5, 0, 0, 0, 0, 0)),
    ],
)
def test_slow_rivals_lose_runs_first_and_auto_never(seconds: float, expected: tuple[int, ...]) -> None:
    assert further_runs(COSTS, 5, seconds) == dict(zip(COSTS, expected, strict=True))


def test_without_auto_the_budget_holds_for_all() -> None:
    rivals = {name: COSTS[name] for name in ("send_recv", "torch_p2p")}
    assert further_runs(rivals, 5, 9.0) == {"send_recv": 2, "torch_p2p": 0}
    assert further_runs(rivals, 5, 0.0) == {"send_recv": 0, "torch_p2p": 0}


def test_the_last_case_may_take_all_that_is_left() -> None:
    assert shares([1.0, 1.0, 2.0]) == [0.25, pytest.approx(1 / 3), 1.0]


def test_every_strategy_is_in_a_default_table() -> None:
    table2 = reshard_perf.choose_strategies(reshard_perf.parse(["--suite", "table2"]))
    assert table2 == reshard_perf.choose_strategies(reshard_perf.parse(["--strategies", "all"]))
    for suite in ("table2", "fig5", "fig8", "refit", "random"):
        assert reshard_perf.choose_strategies(reshard_perf.parse(["--suite", suite]))[:2] == ["auto", "striped"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--hard", "--hard has no effect with --suite table2"),
        ("--suite table2 --seeds 3", "--seeds has no effect with --suite table2"),
        ("--suite refit --first-seed 3", "--first-seed has no effect with --suite refit"),
        ("--suite random --case-file cases.json --hard", "--hard has no effect with --case-file"),
        ("--case-file cases.json --num-bytes 1MiB", "--num-bytes has no effect with --case-file"),
        ("--suite loopback --rate 100mbit", "--rate has no effect with --suite loopback"),
        ("--suite loopback --cases c1", "--cases has no effect with --suite loopback"),
        ("--suite loopback --rate-of 1=100mbit", "--rate-of has no effect with --suite loopback"),
        ("--suite loopback --case-file cases.json", "--case-file has no effect with --suite loopback"),
    ],
)
def test_options_without_effect_are_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        reshard_perf.parse(arguments.split())
    assert message in capsys.readouterr().err


def names(*arguments: str) -> list[str]:
    options = reshard_perf.parse(arguments)
    return [case.name for case in reshard_perf.choose_cases(options, reshard_perf.settings_of(options).rate_of)]


def test_cases_choose_from_files_and_hard_layouts_too(tmp_path: Path) -> None:
    entry = {"shape": "16,8", "src_mesh": "2x2", "src": "S0,R", "dst_mesh": "2x2@4", "dst": "R,S1"}
    path = tmp_path / "cases.json"
    path.write_text(json.dumps([entry | {"name": name} for name in ("a", "b", "c")]))
    assert names("--case-file", str(path), "--cases", "c,a") == ["a", "c"]
    found = names("--suite", "random", "--hard", "--seeds", "2")
    assert names("--suite", "random", "--hard", "--seeds", "2", "--cases", found[1]) == found[1:]
    with pytest.raises(ValueError, match="'z'"):
        names("--case-file", str(path), "--cases", "a,z")


@pytest.mark.parametrize("rate_of", [{}, {1: "50mbit"}])
def test_hard_layouts_are_those_far_from_their_bound(rate_of: dict[int, str]) -> None:
    size = {"num_bytes": 64 << 20, "hosts": 5, "devices": 4}
    found = hard.hard_cases(3, first_seed=0, rate="400mbit", rate_of=rate_of, **size)
    rates = [50e6 / 8 * 0.955 if host in rate_of else 400e6 / 8 * 0.955 for host in range(5)]

    def is_hard(case: Case) -> bool:
        bound = bound_seconds(case, lambda rank: rank // 4, rates)
        return bound >= 1 and hard.best_broadcast_ratio(case, devices=4, nic_bytes_per_s=rates, bound=bound) > 1.2

    last = int(found[-1].name.removeprefix("seed"))
    cases = [random_case(seed, **size) for seed in range(last + 1)]
    assert [case.name for case in found] == [case.name for case in cases if is_hard(case)]


def test_a_slow_nic_makes_other_layouts_hard() -> None:
    arguments = ("--suite", "random", "--hard", "--seeds", "3")
    assert names(*arguments) != names(*arguments, "--rate-of", "1=50mbit")


def test_too_few_hard_layouts_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hard, "_MAX_TRIES", 3)
    with pytest.raises(ValueError, match=r"0 of 2 hard layouts within 3 seeds from 5"):
        hard.hard_cases(2, first_seed=5, rate="none", rate_of={}, num_bytes=4096, hosts=2, devices=2)


def test_a_chart_of_every_strategy_is_readable(tmp_path: Path) -> None:
    from matplotlib import image

    def record(case: str, strategy: str) -> Record:
        return Record(case, strategy, 1 << 20, 1.5, 1.4, 1.6, 1.4, 1.07, None, 12, 0, 5, 0.5)

    strategies = reshard_perf.choose_strategies(reshard_perf.parse([]))
    path = tmp_path / "chart.png"
    about = {"suite": "table2", "cluster": "a cluster"}
    charts.plot(path, [record(case, name) for case in ("c1", "c2") for name in strategies], about=about)
    pixels = (image.imread(path)[:, :, :3] * 255).round().astype(int) @ (1 << 16, 1 << 8, 1)
    drawn = {f"#{pixel:06x}" for pixel in np.unique(pixels).tolist()}
    colors = colors_of(strategies)
    assert len(set(colors)) == len(strategies)
    assert set(colors) <= drawn
    many = [record(f"seed{seed}", name) for seed in range(30) for name in strategies]
    charts.plot(path, many, about=about)
    assert image.imread(path).shape[1] <= 1100
