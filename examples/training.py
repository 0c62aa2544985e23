"""What the training examples share: the comparison with one process, a progress bar, the pictures."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import torch_xmesh as xm
from torch_xmesh.testing import SerialResult


def assert_as_serial(engine: xm.PipelineEngine, reference: nn.Module, serial: SerialResult) -> None:
    """Compares loss and every gradient of the step just made with those that one process made on ``reference``."""
    loss = engine.last_loss()
    assert loss is not None
    assert abs(loss - float(serial.loss)) < 1e-4 * abs(loss), f"loss {loss}, in one process {float(serial.loss)}"
    expected = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in engine.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-5)


def progress(step: int, steps: int, loss: float) -> None:
    """On a terminal a bar that is written over, elsewhere a line for every ten steps."""
    text, is_last = f"step {step + 1}/{steps}, loss {loss:.3f}", step + 1 == steps
    if sys.stdout.isatty():
        done = 30 * (step + 1) // steps
        print(f"\r[{'#' * done}{'.' * (30 - done)}] {text}", end="\n" if is_last else "", flush=True)
    elif (step + 1) % 10 == 0 or is_last:
        print(text, flush=True)


def training_parser(description: str | None, *, batch: int) -> argparse.ArgumentParser:
    """The options of every training example."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--check-steps", type=int, default=2, help="steps to compare with one process")
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--microbatches", type=int, default=8)
    add_pictures(parser)
    return parser


def add_pictures(parser: argparse.ArgumentParser) -> None:
    """The options that :func:`draw_pictures` reads."""
    parser.add_argument("--losses", default="losses.png", help="draw the loss curve into this file (%(default)s)")
    parser.add_argument("--timeline", help="draw the last step of all ranks into this file")


def draw_pictures(engine: xm.PipelineEngine, losses: list[float], options: argparse.Namespace) -> None:
    """The loss curve, and what ran when where that is asked for. Called by all ranks; the first one draws, and says
    what it drew. Without matplotlib it says that instead."""
    if dist.get_rank() == 0:
        draw_or_say(options.losses, "the loss of each step", lambda path: draw_losses(losses, path))
    if options.timeline:
        draw_or_say(options.timeline, "what ran when in the last step", engine.timeline)


def draw_or_say(path: str, what: str, draw: Callable[[Path], None]) -> None:
    try:
        draw(Path(path))
        outcome = f"{path} shows {what}"
    except ImportError as error:
        outcome = f"{path} is left out: {error} (it needs matplotlib)"
    if dist.get_rank() == 0:
        print(outcome)


def draw_losses(losses: list[float], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(losses)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    figure.tight_layout()
    figure.savefig(path)
