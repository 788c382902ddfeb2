"""Hundreds of bad run files, derived from a good one, are each refused with a message, without a traceback."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

import pytest
import yaml

from harness.language_model import run_values
from thunder_memsave.finetune.run.check_references import check_references
from thunder_memsave.finetune.run.job import prepare
from thunder_memsave.finetune.run_file.config import ClassSpec, RunConfig
from thunder_memsave.finetune.run_file.reading.parse import read_run_file
from thunder_memsave.finetune.run_file.reading.problems import Problems
from thunder_memsave.settings.problems import ConfigError, ConfigErrors

# One value of each YAML type; a value is wrong for a key that does not accept its type.
VALUES: tuple[Any, ...] = ("nonsense", 7, 1.5, True, None, [1, 2], {"a": 1}, [[]], {"a": {"b": []}})


def kinds(hint: Any) -> set[Any]:
    """Return the types of YAML values that a key accepts."""
    if get_origin(hint) is Literal:
        return set()  # none of `VALUES` is a choice
    if get_origin(hint) in (Union, types.UnionType):
        return set().union(*(kinds(each) for each in get_args(hint)))
    if isinstance(hint, NewType):
        return kinds(hint.__supertype__)
    if hint is float:
        return {float, int}
    if hint is ClassSpec or dataclasses.is_dataclass(hint):
        return set()  # none of the mappings in `VALUES` has its keys
    return {get_origin(hint) or hint}


def keys(
    cls: Any = RunConfig, *, above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, hint in get_type_hints(cls).items():
        yield (*above, name), hint
        for section in (hint, *get_args(hint)):  # one that may be null is one of several
            if dataclasses.is_dataclass(section):
                yield from keys(section, above=(*above, name))


def changed(values: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    copy: dict[str, Any] = deepcopy(dict(values))
    place = copy
    for name in path[:-1]:
        place = place.setdefault(name, {})
    place[path[-1]] = value
    return copy


def wrong_types(good: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for path, hint in keys():
        for value in VALUES:
            if type(value) not in kinds(hint):
                yield f"{'.'.join(path)}={value!r}", yaml.safe_dump(changed(good, path, value))


OUT_OF_RANGE: dict[str, tuple[Any, ...]] = {
    "train.global_batch_size": (0, -1, 10**30),
    "train.micro_batch_size": (0, -4, 3),
    "train.gradient_accumulation_steps": (0, 3),
    "train.epochs": (0, -1),
    "train.max_steps": (0, -1),
    "train.max_grad_norm": (0, -1.0, float("nan")),
    "train.seed": (-1, 2**32, 10**30),
    "data.max_seq_length": (1, 0, -5),
    "eval.every_n_steps": (0, -1),
    "eval.max_batches": (0, -1),
    "checkpoint.every_n_steps": (0, -1),
    "checkpoint.keep_last": (0, -2),
    "guards.max_skips": (-1,),
    "guards.spike_window": (0, -3),
    "guards.spike_threshold": (0, -1.0, float("inf"), float("nan")),
    "lr_scheduler.warmup_steps": (-1, 2.5, float("inf"), float("nan")),
    "lr_scheduler.min_lr_ratio": (-0.1, 1.5, float("nan")),
    "devices": (0, -1),
    "memory.budget": ("60", "60 gigabytes", "-1GiB", -1, 0, 1.5, float("nan"), [], True),
    "memory.reserve": (-1, 2.0, float("nan")),
    "memory.policy": ("fast", 3),
    "memory.limits": ("cache", 3),
    "strategy.timeout": ("0s", "5", "-1min", 3, [], None),
    "strategy.sharding": ("zero4", 3, {"mode": "zero3", "sizes": 2}),
    "strategy.nonfinite_gradients": ("explode", False),
    "strategy.prefetches": (1,),
    "fp8.recipe": ("immediate", 8),
    "fp8.backend": ("cuda",),
    "memory.offload": ("everything", 3, True),
    "memory.host_budget": ("64", "64 gigabytes", -1, 0.5, []),
    "preference": ({}, {"loss": "ppo"}, {"losses": "dpo"}, {"loss": "kto", "margin": 1}),
    "preference.beta": (0, -0.1, float("nan"), float("inf")),
    "preference.desirable_weight": (0, -1, float("nan")),
    "optimizer.class_path": (
        "torch.optim.Adamw",
        "torch.nn.Linear",
        "os.system",
        "",
        "no.such.Class",
        "a b",
    ),
    "optimizer.init_args.lr": ("fast", [], None),
    "optimizer.init_args.learning_rate": (0.1,),
    "data.dataset.class_path": ("JSONL", "os.system", "builtins.eval", "../x", "PromptJSONL()"),
    "data.dataset.init_args.file": ("x",),
    "data.dataset.init_args.path": (3, None, []),
    "data.dataset.init_args.val_fraction": ("half", -0.1, 1.5),
    "callbacks": (
        [{"class_path": "subprocess.Popen"}],
        [{"init_args": {}}],
        ["EarlyStopping"],
        [None],
    ),
    "loggers": ([{"class_path": "os.system", "init_args": {"command": "true"}}], [{}]),
    "lora.r": (0, "many", None, 1.5),
    "lora.rank": (4,),
    "adapter": ({"class_path": "IA3Config"}, {"class_path": "LoraConfigs"}),
    "resume": (True, "", 3),
    "model.config": ({}, {"model_type": "no_such_model"}),
    "trian": ({"max_steps": 1},),
    "train.max_step": (1,),
}


def out_of_range(good: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, values in OUT_OF_RANGE.items():
        for value in values:
            text = yaml.safe_dump(changed(good, tuple(key.split(".")), value))
            yield f"{key}={value!r}", text


def missing(good: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ("model", "data", "output_dir"):
        yield f"without {key}", yaml.safe_dump({k: v for k, v in good.items() if k != key})
    yield "without a path", yaml.safe_dump(changed(good, ("data", "dataset", "init_args"), {}))


def bad_yaml(good: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    text = yaml.safe_dump(dict(good))
    bomb = "\n".join(
        ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
        + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    )
    added = {
        "bomb of aliases": bomb,
        "bomb of merges": "a0: &a0 {x: 1}\n"
        + "\n".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40)),
        "alias of itself": "more: &more [*more]",
        "object": "more: !!python/object/apply:os.system [echo]",
        "name": "more: !!python/name:os.system ''",
        "module": "more: !!python/module:os ''",
        "new": "more: !!python/object/new:os.system [echo]",
        "tuple": "more: !!python/tuple [1]",
        "own tag": "more: !mine 3",
        "set": "more: !!set {a, b}",
        "binary": "more: !!binary aGVsbG8=",
        "tag in a good key": "devices: !!python/object/apply:os.cpu_count []",
        "twice": "output_dir: other",
        "tab": "train:\n\tmax_steps: 1",
        "open bracket": "more: [1, 2",
        "open quote": "more: 'text",
        "two documents": "---\nmore: 1",
        "directive": "%YAML 9.9\n---\n",
        "unknown alias": "more: *nowhere",
        "key that is a list": "? [a, b]\n: 1",
        "key that is null": "null: 1",
        "key that is true": "yes: 1",
        "key with a dot": "train.max_steps: 4",
        "control character": "more: \x07",
        "deep": "more: " + "[" * 3000 + "]" * 3000,
        "deep mapping": "more: " + "{a: " * 3000 + "1" + "}" * 3000,
    }
    for name, line in added.items():
        yield name, f"{text}\n{line}\n"
    for name, whole in {
        "a list": "- 1",
        "a text": "run",
        "nothing": "",
        "only a comment": "# run",
        "JSON that is cut off": '{"model": {',
        "binary file": "\x00\x01\x02",
    }.items():
        yield name, whole


def bad_configs(good: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    return itertools.chain(wrong_types(good), out_of_range(good), missing(good), bad_yaml(good))


def why_refused(path: Path) -> str | None:
    """Return the message of `train` and `validate`; None if the run file is accepted."""
    try:
        run_file = read_run_file(path)
        problems = Problems(run_file.problems)
        check_references(run_file.config, problems)
        problems.raise_all()
        prepare(run_file.config)  # loads a model, which only few runs reach
    except ConfigError as error:
        return "\n".join(map(str, ConfigErrors([error]).problems))
    return None


def check_all_are_refused(configs: list[tuple[str, str]], path: Path) -> None:
    accepted, tracebacks = [], []
    for name, text in configs:
        path.write_text(text)
        try:
            message = why_refused(path)
        except Exception as error:  # counted as a traceback
            tracebacks.append(f"{name}: {type(error).__name__}: {error}"[:300])
            continue
        if not message:
            accepted.append(name)
    assert not tracebacks, "\n".join(tracebacks)
    assert not accepted, "\n".join(accepted)


@pytest.mark.line("bad configs")
def test_no_bad_config_is_accepted_or_ends_in_a_traceback(
    tmp_path: Path, model_directory: Path
) -> None:
    good = run_values(tmp_path, model_directory)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(good))
    assert why_refused(path) is None
    sample = Random(0).sample([*wrong_types(good), *out_of_range(good)], 60)
    check_all_are_refused([*sample, *missing(good), *bad_yaml(good)], path)


@pytest.mark.soak
@pytest.mark.line("bad configs")
def test_none_of_hundreds_of_bad_configs_is_accepted_or_ends_in_a_traceback(
    tmp_path: Path,
    model_directory: Path,
    record_property: Callable[[str, object], None],
) -> None:
    configs = list(bad_configs(run_values(tmp_path, model_directory)))
    assert len(configs) >= 650
    check_all_are_refused(configs, tmp_path / "run.yaml")
    record_property("measured", f"{len(configs)} refused")
