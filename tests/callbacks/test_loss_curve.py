from __future__ import annotations

import errno
from pathlib import Path

import pytest
from lightning.fabric import Fabric
from matplotlib.image import imread

from thunder_memsave.callbacks import LossCurve, loss_curve
from thunder_memsave.callbacks.loss_curve import _Series, draw_loss_curve

ROWS = "step,loss,val_loss,lr\n0,,3.0,\n1,2.5,,0.1\n2,2.0,,0.05\n2,,2.2,\n"


def curve(tmp_path: Path, text: str = ROWS) -> tuple[Fabric, Path]:
    path = tmp_path / "loss.png"
    (tmp_path / "metrics.csv").write_text(text)
    times = iter([0.0, 1.0, 40.0])
    callback = LossCurve(path, clock=lambda: next(times))
    return Fabric(accelerator="cpu", devices=1, callbacks=[callback]), path


@pytest.mark.parametrize("hook", ["on_validation_end", "on_train_end", "on_exception"])
def test_the_curve_is_a_png_beside_the_metrics(tmp_path: Path, hook: str) -> None:
    fabric, path = curve(tmp_path)
    fabric.call(hook, fabric=fabric)
    assert imread(path).shape == (750, 1200, 4)
    assert {each.name for each in tmp_path.iterdir()} == {"loss.png", "metrics.csv"}


def test_drawing_again_waits_a_while(tmp_path: Path) -> None:
    fabric, path = curve(tmp_path)
    drawn = []
    for _ in range(3):
        fabric.call("on_validation_end", fabric=fabric)
        drawn.append(path.exists())
        path.unlink(missing_ok=True)
    assert drawn == [True, False, True]


def test_before_the_first_step_there_is_nothing_to_draw(tmp_path: Path) -> None:
    fabric, path = curve(tmp_path, "step,loss,val_loss,lr\n0,,3.0,\n")
    fabric.call("on_validation_end", fabric=fabric)
    assert not path.exists()


def test_a_run_without_validation_is_drawn(tmp_path: Path) -> None:
    draw_loss_curve([{"step": "1", "loss": "2.0", "lr": "0.1"}], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").exists()


def test_the_smooth_curve_averages_both_sides_and_keeps_a_line_straight() -> None:
    line = _Series(steps=list(range(200)), values=[float(step) for step in range(200)])
    smooth = line.smoothed().values
    assert smooth[10:190] == line.values[10:190]  # it does not lag
    assert smooth[0] == 2.0  # of the first five
    bumpy = _Series(steps=list(range(100)), values=[0.0, 1.0] * 50)
    assert all(0.3 < value < 0.7 for value in bumpy.smoothed().values)


def test_values_that_are_not_finite_leave_the_rest_of_the_curve() -> None:
    losses = ["2.0", "nan", "inf", *["1.0"] * 100]
    rows = [{"step": str(step), "loss": loss} for step, loss in enumerate(losses, start=1)]
    series = _Series.of(rows, "loss")
    assert (series.steps[:2], series.values[:2]) == ([1, 4], [2.0, 1.0])
    assert series.smoothed().values[-1] == 1.0


def test_a_run_whose_only_loss_is_not_finite_has_nothing_to_draw(tmp_path: Path) -> None:
    fabric, path = curve(tmp_path, "step,loss,val_loss,lr\n1,nan,,0.1\n")
    fabric.call("on_exception", fabric=fabric)
    assert not path.exists()


def test_a_curve_that_cannot_be_written_is_warned_of_once_and_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(rows: object, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    fabric, path = curve(tmp_path)
    monkeypatch.setattr(loss_curve, "draw_loss_curve", refuse)
    for hook in ("on_validation_end", "on_exception"):
        fabric.call(hook, fabric=fabric)
    told = f"loss.png could not be drawn (No space left on device: {path}); training goes on"
    assert caplog.text.count(told) == 1
