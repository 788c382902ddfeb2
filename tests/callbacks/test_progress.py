from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pyte
import pytest
from lightning.fabric import Fabric
from rich.console import Console

from thunder_memsave.callbacks import ProgressBar
from thunder_memsave.callbacks.progress import _fields

METRICS = {
    "loss": 2.0,
    "lr": 1e-3,
    "grad_norm": 0.5,
    "tokens_per_s": 1234.0,
    "num_tokens": 500.0,
    "step_seconds": 0.5,
    "mfu": 0.412,
    "peak_allocated_gib": 63.1,
}


class Clock:
    """A clock that advances by a second at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def run(
    console: Console, *, num_steps: int = 4, every: int | None = 2, start: int = 0
) -> Iterator[ProgressBar]:
    """Go through a training, and yield after every hook, to look at the console."""
    bar = ProgressBar(every_n_steps=every, console=console, clock=Clock())
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[bar])
    fabric.call("on_train_start", fabric=fabric, step=start, num_steps=num_steps)
    for step in range(start, num_steps):
        fabric.call("on_train_batch_start", fabric=fabric, step=step)
        yield bar
        about: dict[str, Any] = {"fabric": fabric, "step": step + 1}
        fabric.call("on_train_batch_end", **about, num_steps=num_steps, metrics=METRICS)
        yield bar
    for loss in (1.5, 1.25, 1.75):
        fabric.call("on_validation_start", fabric=fabric, step=num_steps)
        yield bar
        metrics = {"val_loss": loss, "val_perplexity": 4.48}
        num_steps += 1
        fabric.call("on_validation_end", fabric=fabric, step=num_steps, metrics=metrics)
        yield bar
    fabric.call("on_train_end", fabric=fabric, step=4)


def lines_of(**settings: Any) -> list[str]:
    output = io.StringIO()
    for _ in run(Console(file=output, width=80), **settings):
        pass
    return output.getvalue().splitlines()


def test_without_a_terminal_progress_is_lines() -> None:
    lines = lines_of()
    assert [line.split(" |")[0] for line in lines[:3]] == ["step 1/4", "step 2/4", "step 4/4"]
    numbers = "loss 2.0000 | 1.23k tok/s | lr 1.0e-03 | MFU 41.2% | 63.1 GiB | grad norm 0.5"
    assert lines[0] == f"step 1/4 | {numbers}"  # the first step compiles, so it predicts nothing
    assert lines[1] == f"step 2/4 | {numbers} | 0:02 left"


def test_evaluations_tell_which_one_is_the_best() -> None:
    assert lines_of()[3:6] == [
        "step 5/4 | val_loss 1.5000 | perplexity 4.48",
        "step 6/4 | val_loss 1.2500 | perplexity 4.48 | best so far",
        "step 7/4 | val_loss 1.7500 | perplexity 4.48",
    ]


def test_the_end_sums_up_without_the_first_step() -> None:
    assert lines_of()[6:] == [
        "trained 4 steps in 0:04 | 1k tok/s after the first step",
        "val_loss 1.7500 | best 1.2500 after step 6",
    ]


def test_a_long_run_prints_about_twenty_lines() -> None:
    lines = [line for line in lines_of(num_steps=200, every=None) if "loss 2.0000" in line]
    assert 20 <= len(lines) <= 22


def screens(width: int) -> list[list[str]]:
    """Return the terminal's screen after every hook."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=width)
    screen = pyte.Screen(width, 12)
    stream = pyte.Stream(screen)
    shown = []

    def look() -> None:
        stream.feed(output.getvalue().replace("\n", "\r\n"))
        output.seek(0)
        output.truncate()
        shown.append([line.rstrip() for line in screen.display if line.strip()])

    for bar in run(console):
        if bar._bar is not None:
            bar._bar.refresh()
        look()
    look()
    return shown


@pytest.mark.parametrize("width", [60, 80, 140])
def test_on_a_terminal_progress_is_one_line_that_never_wraps(width: int) -> None:
    for shown in screens(width)[:9]:  # then evaluations stand above it
        (line,) = shown
        assert "━" in line
        assert "…" not in line
    bars = {line.count("━") + line.count("╸") + line.count("╺") for (line,) in screens(width)[:9]}
    assert len(bars) == 1


def test_a_wide_terminal_shows_more_than_a_narrow_one() -> None:
    narrow, wide = (screens(width)[3][0] for width in (80, 140))
    assert "2/4 | loss 2.0000 | 1.23k tok/s | lr 1.0e-03 " in narrow
    assert narrow.endswith("· 0:02 left")
    assert "| MFU 41.2% | 63.1 GiB | grad norm 0.5 " in wide


def test_the_bar_says_what_takes_long() -> None:
    shown = screens(80)
    assert "0/4 | compiling the training step" in shown[0][0]
    assert "4/4 | compiling the evaluation" in shown[8][-1]
    assert "4/4 | evaluating after step 5" in shown[10][-1]


def test_at_the_end_the_summary_stands_where_the_bar_was() -> None:
    last = screens(80)[-1]
    assert not any("━" in line for line in last)
    assert last[-2].startswith("trained 4 steps in ")
    assert last[-1] == "val_loss 1.7500 | best 1.2500 after step 6"


def test_a_bar_is_taken_down_when_the_run_fails() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[ProgressBar(console=console)])
    fabric.call("on_train_start", fabric=fabric, step=0, num_steps=4)
    assert console._live_stack
    fabric.call("on_exception", fabric=fabric)
    assert not console._live_stack


def test_a_resumed_bar_knows_the_best_loss_of_before() -> None:
    first = ProgressBar(console=Console(file=io.StringIO()))
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[first])
    fabric.call("on_validation_end", fabric=fabric, step=1, metrics={"val_loss": 1.0})
    output = io.StringIO()
    second = ProgressBar(console=Console(file=output))
    second.load_state_dict(first.state_dict())
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[second])
    fabric.call("on_train_start", fabric=fabric, step=1, num_steps=2)
    fabric.call("on_validation_end", fabric=fabric, step=2, metrics={"val_loss": 2.0})
    fabric.call("on_train_end", fabric=fabric, step=2)
    assert output.getvalue().splitlines()[-1] == "val_loss 2.0000 | best 1.0000 after step 1"


def test_the_speed_is_that_of_all_tokens_that_go_in() -> None:
    numbers = {"tokens_per_s": 592.0, "input_tokens_per_s": 5414.0}
    fields = _fields(numbers)
    assert list(fields.values()) == ["5.41k tok/s", "592 target tok/s"]
    assert list(_fields({"tokens_per_s": 592.0}).values()) == ["592 tok/s"]
    assert numbers == {"tokens_per_s": 592.0, "input_tokens_per_s": 5414.0}
