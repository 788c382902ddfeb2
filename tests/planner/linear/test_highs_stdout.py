from __future__ import annotations

import ctypes
import os

import pytest

from thunder_memsave.planner.linear.highs_stdout import without_noise_of_highs

NOISE = b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();\n"


def test_output_of_highs_from_c_does_not_reach_standard_output(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with without_noise_of_highs():
        ctypes.CDLL(None).printf(NOISE)
    assert capfd.readouterr().out == ""


def test_output_of_others_meanwhile_is_printed_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    with without_noise_of_highs():
        os.write(1, b"first\n" + NOISE)
        os.write(1, b"second\n")
    os.write(1, b"third\n")
    assert capfd.readouterr().out == "first\nsecond\nthird\n"


def test_standard_output_is_back_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no"), without_noise_of_highs():
        raise ValueError("no")
    os.write(1, b"here\n")
    assert capfd.readouterr().out == "here\n"
