from __future__ import annotations

from thunder_memsave.planner.work import Work


def test_a_part_counts_with_the_whole_and_may_go_on_after_it() -> None:
    whole = Work(until=3.0)
    part = whole.part(2.0)
    part.add(1.5)
    assert (whole.left, part.left, part.is_over) == (1.5, 0.5, False)
    part.add(0.5)
    assert (part.is_over, whole.is_over) == (True, False)
    later = whole.part(2.0)
    whole.add(1.0)
    assert (whole.is_over, later.left) == (True, 1.0)


def test_work_without_a_limit_is_never_over() -> None:
    work = Work()
    work.add(1e9)
    assert not work.is_over
