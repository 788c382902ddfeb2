"""A budget gets the fastest plan that is known to fit it, whatever memory later passes added to other plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.training_graphs import GraphBuilder
from thunder_memsave.budget import plan_request
from thunder_memsave.budget.plan_request import SMALLEST, Question
from thunder_memsave.errors import BudgetError
from thunder_memsave.planner.actions import KEEP, NO_ACTIONS, RECOMPUTE, Actions, keeping
from thunder_memsave.planner.graph import Plan, StepMemory

FAST, SLOW = keeping("ab"), Actions({"a": KEEP, "b": RECOMPUTE})


@pytest.fixture
def question() -> Question:
    graph = GraphBuilder()
    x = graph.input("x")
    graph.op(x, {"a": 10})
    graph.op("a", {"b": 10})
    graph.backward(db=10)
    graph.op("b a db", {"dx": 10})
    return Question(
        graph=graph.graph(outputs="", gradients="dx"),
        policy="plan",
        costs_us=(20.0, 30.0, 1.0),
        memory=StepMemory(),
        pinned=NO_ACTIONS,
        generator_state_bytes=0,
        costs="of this test",
    )


def plan(actions: Actions, recompute_us: float) -> Plan:
    return Plan(
        actions=actions,
        budget_bytes=None,
        predicted_peak_bytes=50,
        keep_all_peak_bytes=60,
        saved_bytes=10,
        recompute_us=recompute_us,
        lower_bound_us=recompute_us / 2,
    )


def solves(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], Plan]) -> None:
    monkeypatch.setattr(plan_request, "solve", lambda *args, **kwargs: answer())


def refuse() -> Plan:
    raise BudgetError.no_plan(
        budget_bytes=70, smallest_bytes=80, bound_bytes=75, smallest_plan=plan(SLOW, 90.0)
    )


def test_a_plan_that_ran_within_the_budget_is_taken_where_a_corrected_target_gives_a_slower_one(
    question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    question.remember_run(plan(FAST, 20.0), peak_bytes=95)
    solves(monkeypatch, lambda: plan(SLOW, 50.0))
    found = question.answer(85, budget_bytes=100).plan
    assert (found.actions, found.recompute_us, found.budget_bytes) == (FAST, 20.0, 100)
    assert found.lower_bound_us == 0.0  # the bound for 85 does not hold for 100
    assert question.answer(85, budget_bytes=94).plan.actions == SLOW
    assert question.answer(85, budget_bytes=100, too_large=[FAST]).plan.actions == SLOW


def test_a_plan_that_ran_is_not_taken_where_the_search_finds_a_faster_one(
    question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    question.remember_run(plan(SLOW, 50.0), peak_bytes=95)
    solves(monkeypatch, lambda: plan(FAST, 20.0))
    assert question.answer(100, budget_bytes=100).plan.actions == FAST


def test_a_plan_that_ran_is_taken_where_none_is_found_but_not_for_the_smallest(
    question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    question.remember_run(plan(FAST, 20.0), peak_bytes=95)
    solves(monkeypatch, refuse)
    offer = question.answer(70, budget_bytes=100)
    assert (offer.plan.actions, offer.is_smallest, offer.plan.lower_bound_us) == (FAST, False, 0.0)
    smallest = question.answer(SMALLEST, budget_bytes=100)
    assert (smallest.plan.actions, smallest.is_smallest) == (SLOW, True)


def test_what_no_plan_fits_is_solved_once(
    question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved = []

    def none_below_75() -> Plan:
        solved.append(1)
        raise BudgetError.no_plan(
            budget_bytes=70,
            smallest_bytes=80,
            bound_bytes=75,
            smallest_plan=replace(plan(SLOW, 90.0), predicted_peak_bytes=80),
        )

    solves(monkeypatch, none_below_75)
    question = replace(question, costs_us=(20.0, 30.0, 2.0))  # which no other test has asked
    first, *others = [question.answer(target, budget_bytes=target) for target in (70, 70, 74)]
    assert len(solved) == 1
    assert (first.is_smallest, first.bound_bytes, first.plan.actions) == (True, 75, SLOW)
    found = [(o.is_smallest, o.bound_bytes, o.plan.actions) for o in others]
    assert found == [(True, 75, SLOW)] * 2
    question.answer(75, budget_bytes=75)
    assert len(solved) == 2  # a plan of 75 is not ruled out
