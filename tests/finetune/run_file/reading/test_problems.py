from __future__ import annotations

import pytest

from thunder_memsave.finetune.run_file.keys.unknown_keys import UnknownKeyError
from thunder_memsave.finetune.run_file.reading.problems import Problems
from thunder_memsave.settings.problems import ConfigError, ConfigErrors, MissingKeyError


def failing(*problems: ConfigError) -> None:
    raise ConfigErrors(problems)


def test_a_check_gives_its_result_or_keeps_what_it_found() -> None:
    problems = Problems()
    assert problems.check(lambda: 3, reads=(), about="train") == 3
    assert (
        problems.check(lambda: failing(ConfigError("a"), ConfigError("b")), reads=(), about="x")
        is None
    )
    assert [(str(each), each.key) for each in problems.found] == [("a", "x"), ("b", "x")]
    with pytest.raises(ConfigErrors, match="a\nb"):
        problems.raise_all()


def test_without_problems_nothing_is_raised() -> None:
    Problems().raise_all()


@pytest.mark.parametrize("reads", ["train", "train.seed", "train.seed.x", "train.seed[0]"])
def test_a_check_is_left_out_when_what_it_reads_is_wrong(reads: str) -> None:
    problems = Problems([ConfigError("wrong", key="train.seed")])
    assert problems.check(lambda: 3, reads=(reads,), about="x") is None
    assert len(problems.found) == 1


@pytest.mark.parametrize("reads", ["train.epochs", "train.seeds", "data", "t"])
def test_a_check_of_other_keys_is_done(reads: str) -> None:
    problems = Problems([ConfigError("wrong", key="train.seed")])
    assert problems.check(lambda: 3, reads=(reads,), about="x") == 3


def test_a_second_problem_of_a_key_would_follow_from_the_first() -> None:
    problems = Problems([ConfigError("wrong type", key="train.seed")])
    problems.add(ConfigError("out of range", key="train.seed"), ConfigError("other", key="data"))
    assert [str(each) for each in problems.found] == ["wrong type", "other"]


def test_what_somebody_meant_by_an_unknown_key_is_not_missing() -> None:
    problems = Problems([UnknownKeyError("base_model", key="base_model", meant=["model.x"])])
    problems.add(MissingKeyError("model.x is missing", key="model.x"))
    assert [str(each) for each in problems.found] == ["base_model"]
    assert problems.is_broken("model")


def test_a_wrong_value_of_what_an_unknown_key_meant_is_reported_too() -> None:
    problems = Problems([UnknownKeyError("deepspeed", key="deepspeed", meant=["strategy.x"])])
    problems.add(ConfigError("strategy.x is 'zero9'", key="strategy.x"))
    assert [str(each) for each in problems.found] == ["deepspeed", "strategy.x is 'zero9'"]


def test_the_words_of_a_message_do_not_decide_what_it_is_about() -> None:
    problems = Problems()
    error = ConfigError("train.seed is odd")
    problems.check(lambda: failing(error), reads=(), about="data.dataset")
    assert problems.found[0].key == "data.dataset"
