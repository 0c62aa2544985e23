"""The benchmark of split backwards: small models through its functions, and its bars on made-up records."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import split_perf
import torch
from parts.split.measure import follow_memory, time_backwards
from parts.split.models import (
    FULL,
    GRAD,
    MODELS,
    OURS,
    OURS_FIRST,
    TORCH,
    Method,
    Model,
    Pass,
    conv_norm,
    doublings,
    linear,
    num_wrong,
    tiny_chain,
    transformer,
    transformer_eager,
)
from parts.split.records import MemoryRecord, TimeRecord, bar_lines, error_lines, model_row

SMALL: list[Callable[[], Model]] = [
    lambda: linear(2, 8, 4),
    lambda: transformer(1, 16, 4, 2),
    lambda: transformer_eager(1, 16, 4, 2),
    lambda: conv_norm(1, 4, 6, 2),
    lambda: tiny_chain(3),
]


@pytest.mark.parametrize("make", SMALL)
def test_all_methods_of_a_model_are_timed_and_followed(make: Callable[[], Model]) -> None:
    model = make()
    full, ours, _ = time_backwards("models", model, [FULL, OURS, TORCH], runs=2)
    assert (full.method, full.wrong, full.ratio) == ("full", 0, 1.0)
    assert (ours.method, ours.wrong, ours.error, ours.runs) == ("ours", 0, None, 2)
    assert ours.input_seconds is not None
    assert ours.seconds is not None
    assert 0 < ours.input_seconds < ours.seconds
    whole, split, _ = follow_memory(model, [FULL, OURS, TORCH])
    assert whole.wrong == split.wrong == 0
    assert whole.forward_bytes == split.forward_bytes
    # Every gradient is left, and nothing else.
    gradients = model.input.nbytes + sum(weight.nbytes for weight in model.module.parameters())
    assert whole.end_bytes == split.end_bytes == gradients


def test_held_are_the_inputs_and_output_gradients_of_products() -> None:
    _, ours = follow_memory(linear(layers=3, width=32, batch=8), [FULL, OURS])
    one = 8 * 32 * 4
    assert ours.forward_bytes == 3 * one
    # Two inputs (the first is the given one), three gradients of outputs, the input's gradient.
    assert ours.held_bytes == 6 * one


def test_a_chain_without_weights_has_nothing_left_for_later() -> None:
    grad, ours = time_backwards("walk", doublings(20), [GRAD, OURS_FIRST], runs=2)
    assert grad.wrong == ours.wrong == 0
    assert ours.parts == 20
    assert ours.added_seconds_per_part is not None


def test_a_gradient_is_wrong_by_the_elements_that_differ_in_a_bit() -> None:
    expected = torch.tensor([[0.0, 1.0], [2.0, float("nan")]])
    assert num_wrong([expected.clone()], [expected]) == 0
    assert num_wrong([torch.tensor([[-0.0, 1.0], [3.0, float("nan")]])], [expected]) == 2
    assert num_wrong([None, None], [expected, None]) == 4
    assert num_wrong([expected], [None]) == 4
    assert num_wrong([expected.reshape(4)], [expected]) == 4


def test_what_a_rival_raises_is_said_instead_of_its_time() -> None:
    def fail(run: Pass) -> None:
        raise RuntimeError("no such edge\nand more")

    rival = Method("torch", fail, is_rival=True)
    full, record = time_backwards("models", linear(1, 4, 2), [FULL, rival], runs=1)
    assert full.error is None
    assert error_lines([full, record]) == ["linear, torch raises RuntimeError: no such edge"]
    assert model_row(record) == ["linear", "torch", "-", "-", "-", "-", "-", "-", "raises"]
    assert follow_memory(linear(1, 4, 2), [FULL, rival])[1].error is not None
    with pytest.raises(RuntimeError, match="no such edge"):
        time_backwards("models", linear(1, 4, 2), [FULL, Method("ours", fail)], runs=1)


def test_every_rival_run_is_compared() -> None:
    def keep_weights(run: Pass) -> None:
        (run.input_gradient,) = torch.autograd.grad(run.output, run.input, run.output_gradient)

    rival = Method("torch", keep_weights, is_rival=True)
    _, record = time_backwards("models", linear(1, 4, 2), [FULL, rival], runs=2)
    assert record.wrong == 3 * (16 + 4)  # the uncounted run too


def test_bars_say_what_is_missed_and_by_how_much() -> None:
    records: list[TimeRecord | MemoryRecord] = [
        TimeRecord("models", "linear", "ours", 0, ratio=1.01, ratio_median=1.03, input_ratio=0.53),
        TimeRecord("chains", "64 layers", "ours", 0, parts=64, seconds=64e-6, added_seconds_per_part=10e-6),
        TimeRecord("chains", "256 layers", "ours", 0, parts=256, seconds=512e-6, added_seconds_per_part=20e-6),
        TimeRecord(
            "walk", "9 nodes", "ours", 0, parts=9, added_seconds_per_part=0.1e-6, added_seconds_per_part_median=0.3e-6
        ),
        MemoryRecord("memory", "linear", "ours", 0, peak_ratio=1.0, held_ratio=1.0),
        TimeRecord("models", "conv_norm", "torch", 0, ratio=9.0),
    ]
    assert bar_lines(records) == [
        "linear: I+W over full, least of all runs 1.010; bar 1.02: met",
        "linear: I+W over full, median of turns 1.030; bar 1.02: NOT met, 0.01 above",
        "linear: I over full 0.530; bar 0.52: NOT met, 0.01 above",
        "64 layers: us added per early cut 10.000; bar 15: met",
        "256 layers: us added per early cut 20.000; bar 15: NOT met, 5 above",
        "9 nodes: us added per node, least of all runs 0.100; bar 0.2: met",
        "9 nodes: us added per node, median of turns 0.300; bar 0.2: NOT met, 0.1 above",
        "I+W of a layer among 256 over one among 64 2.000; bar 1.25: NOT met, 0.75 above",
        "linear: peak in I over peak of full 1.000; bar 1.05: met",
        "linear: held over left by forward 1.000; bar 0.9: NOT met, 0.1 above",
    ]


def test_a_small_run_writes_every_family(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "linear", SMALL[0])
    path = tmp_path / "split.json"
    arguments = ["--models", "linear", "--runs", "1", "--layers", "2,4", "--nodes", "10", "--json", str(path)]
    assert split_perf.main(arguments) == 0
    written = json.loads(path.read_text())
    assert written["about"]["machine"][0].startswith("torch ")
    found = [(one["family"], one["case"], one["method"]) for one in written["records"]]
    methods = ("full", "ours", "torch")
    expected = [("models", "linear", method) for method in methods]
    expected += [("chains", f"{layers} layers", method) for layers in (2, 4) for method in methods]
    expected += [("walk", "10 nodes", method) for method in ("grad", "ours")]
    assert found == [*expected, *(("memory", "linear", method) for method in methods)]
    assert all(one["wrong"] == 0 for one in written["records"] if one["method"] != "torch")
    printed = capsys.readouterr().out
    assert printed.startswith("# torch_xmesh split_perf\n# torch ")
    assert "# linear: I+W over full, least of all runs " in printed
    assert "# #wrong over all rows: 0" in printed


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--models", "gpt5"], "'gpt5' is not one of linear, transformer, transformer_eager, conv_norm"),
        (["--runs", "0"], "0 is less than 1"),
        (["--layers", "16,-1"], "-1 is less than 1"),
    ],
)
def test_wrong_arguments_end_with_2(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        split_perf.main(arguments)
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err
