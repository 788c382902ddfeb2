"""Who listens hears of every stage, and nobody else does."""

from __future__ import annotations

from thunder_memsave.progress import Stage, listening, stage


def test_a_listener_hears_of_stages_until_it_listens_no_more() -> None:
    heard: list[Stage] = []
    stage("capture")
    with listening(heard.append):
        stage("lower")
        stage("solve")
        stage("solve")
    stage("simulate")
    assert heard == ["lower", "solve", "solve"]


def test_the_inner_listener_hears_alone() -> None:
    outer: list[Stage] = []
    inner: list[Stage] = []
    with listening(outer.append):
        with listening(inner.append):
            stage("extract")
        stage("solve")
    assert (outer, inner) == (["solve"], ["extract"])
