from __future__ import annotations

from pathlib import Path

from thunder_memsave.finetune.run_file.reading.report import Source, report
from thunder_memsave.settings.problems import ConfigError, ConfigErrors

SOURCE = Source(
    path=Path("run.yaml"),
    lines={"train": 3, "train.seed": 12, "loggers[0]": 20},
    overrides={"train.max_steps": "--train.max_steps=ten", "lora": "--lora={r: x}"},
)


def lines_of(*problems: ConfigError) -> list[str]:
    return report(ConfigErrors(problems), SOURCE).splitlines()


def test_problems_stand_in_the_order_of_their_places() -> None:
    assert lines_of(
        ConfigError("the environment"),
        ConfigError("rows.jsonl: 5 more", place="rows.jsonl"),
        ConfigError("rows.jsonl:10: ten", place="rows.jsonl:10"),
        ConfigError("rows.jsonl:9: nine", place="rows.jsonl:9"),
        ConfigError("r is wrong", key="lora.r"),
        ConfigError("steps are wrong", key="train.max_steps"),
        ConfigError("seed is wrong", key="train.seed"),
        ConfigError("no epochs", key="train.epochs"),
        ConfigError("no model", key="model.name_or_path"),
        ConfigError("twice", key="train.seed", place="run.yaml:13"),
        ConfigError("a logger", key="loggers[0].init_args.x"),
    ) == [
        "error: run.yaml cannot be used; 11 problems:",
        "  run.yaml: no model",
        "  run.yaml:3: no epochs",
        "  run.yaml:12: seed is wrong",
        "  run.yaml:13: twice",
        "  run.yaml:20: a logger",
        "  --train.max_steps=ten: steps are wrong",
        "  --lora={r: x}: r is wrong",
        "  rows.jsonl:9: nine",
        "  rows.jsonl:10: ten",
        "  rows.jsonl: 5 more",
        "  the environment",
    ]


def test_an_override_within_a_section_that_the_file_lacks_is_the_place() -> None:
    source = Source(path=Path("run.yaml"), overrides={"memory.budget": "--memory.budget=1"})
    assert report(ConfigError("no keys", key="memory"), source).splitlines()[1:] == [
        "  --memory.budget=1: no keys"
    ]


def test_a_run_file_may_be_shown_by_another_name() -> None:
    path = Path("package/tiny.yaml")
    source = Source(path=path, name="tiny.yaml", lines={"train": 3})
    problems = [
        ConfigError("in train", key="train.seed"),
        ConfigError("twice", place=f"{path}:4"),
        ConfigError("no model", key="model"),
        ConfigError("empty", place=str(path)),
    ]
    assert report(ConfigErrors(problems), source).splitlines() == [
        "error: tiny.yaml cannot be used; 4 problems:",
        "  tiny.yaml: empty",
        "  tiny.yaml: no model",
        "  tiny.yaml:3: in train",
        "  tiny.yaml:4: twice",
    ]


def test_one_problem_is_one_problem_and_none_is_told_twice() -> None:
    problem = ConfigError("seed is wrong", key="train.seed")
    expected = ["error: run.yaml cannot be used; 1 problem:", "  run.yaml:12: seed is wrong"]
    assert lines_of(problem, ConfigError("seed is wrong", key="train.seed")) == expected
    assert report(problem, SOURCE).splitlines() == expected


def test_a_long_override_is_cut() -> None:
    source = Source(path=Path("run.yaml"), overrides={"lora": "--lora={" + "a: 1,\n" * 100})
    place = report(ConfigError("wrong", key="lora"), source).splitlines()[1]
    assert place.startswith("  --lora={a: 1, a: 1, ")
    assert place.endswith("...: wrong")
    assert len(place) == len("  ") + 60 + len(": wrong")


def test_without_a_run_file_the_message_stands_alone() -> None:
    assert report(ConfigError("there is no command 'x'."), Source()) == (
        "error: there is no command 'x'."
    )
