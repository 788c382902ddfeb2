from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import pytest
import torch

from thunder_memsave.config import Fp8Config
from thunder_memsave.finetune.run_file.config import ClassSpec
from thunder_memsave.settings.value_kinds import Bytes, at_least, fits, unquoted, wanted


class Color(Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (int, 3),
        (float, 3),
        (float, 0.5),
        (str, "x"),
        (bool, False),
        (type(None), None),
        (Any, object()),
        (int | None, None),
        (Union[int, None], 3),  # noqa: UP007 - both spellings are in use
        (Literal["a", 1], 1),
        (list, [1, "x"]),
        (list[int], [1, 2]),
        (tuple[float, float], [0.9, 1]),
        (tuple[int, ...], [1, 2, 3]),
        (tuple, [1]),
        (Sequence[str], ["a"]),
        (set[str], ["a"]),
        (Iterable[list[int]], [[1], []]),
        (dict, {"a": 1}),
        (dict[str, int], {"a": 1}),
        (Mapping[str, Any], {}),
        (ClassSpec, {"class_path": "A"}),
        (Path, "x"),
        (Path | str | None, "x"),
        (Color, "red"),
        (torch.Tensor, 3),
        (float | torch.Tensor, 1e-3),
        (torch.Tensor | torch.device, "cpu"),
    ],
)
def test_these_values_fit(hint: Any, value: object) -> None:
    assert fits(hint, value)


@pytest.mark.parametrize(
    ("hint", "value", "read"),
    [
        (float, "2e-4", 2e-4),
        (int, "16", 16),
        (float | torch.Tensor, "1", 1.0),
        (int | Literal["auto"], "2", 2),
        (float | str, "2e-4", "2e-4"),
        (str | None, "3", "3"),
        (Any, "3", "3"),
        (tuple[float, float], ["0.9", "0.95"], (0.9, 0.95)),
        (list[str], ["3"], ["3"]),
        (Bytes, "1KiB", "1KiB"),
    ],
)
def test_a_quoted_number_is_one_where_no_text_is_taken(
    hint: Any, value: object, read: object
) -> None:
    assert fits(hint, value)
    assert unquoted(hint, value) == read
    assert type(unquoted(hint, value)) is type(read)


@pytest.mark.parametrize(
    ("hint", "value", "words"),
    [
        (int, True, "a whole number"),
        (int, 1.0, "a whole number"),
        (float, "1e", "a number"),
        (float, "nan", "a number"),
        (int, "1.5", "a whole number"),
        (float, True, "a number"),
        (str, 3, "a text"),
        (bool, 1, "true or false"),
        (bool, "yes", "true or false"),
        (int | None, "a", "a whole number or null"),
        (int | float, "a", "a number"),
        (None | int, "a", "a whole number or null"),
        (float | torch.Tensor, "abc", "a number"),
        (tuple[float | torch.Tensor, float], 0.9, "a list of 2: a number, a number"),
        (tuple[float, float], [0.9], "a list of 2: a number, a number"),
        (Literal["a", "b"], "c", "'a' or 'b'"),
        (Literal["a", "b", "c"] | None, "d", "one of 'a', 'b', 'c' or null"),
        (Literal["auto"] | Bytes, "1 parsec", "'auto' or bytes, such as 256MiB"),
        (tuple[str, ...] | None, ["a", 1], "a list of names or null"),
        (Annotated[int, at_least(2)] | None, 1, "a whole number or null"),
        (Annotated[str, "the name of a class"], 1, "the name of a class"),
        (Fp8Config | None, 3, "a mapping or null"),
        (timedelta, None, "a duration"),
        (Literal["a", 1], True, "'a' or 1"),
        (int | Literal["auto"], "many", "a whole number or 'auto'"),
        (list[str] | str | None, 3, "a list of texts or a text or null"),
        (list[int], [1, "x"], "a list of whole numbers"),
        (list[tuple[int, int]], [[1]], "a list of a list of 2: a whole number, a whole number"),
        (list, "x", "a list"),
        (dict[str, int], {"a": "b"}, "a mapping"),
        (list[ClassSpec], {}, "a list of mappings"),
        (Path, 3, "a text"),
    ],
)
def test_other_values_do_not_and_it_is_said_what_would(
    hint: Any, value: object, words: str
) -> None:
    assert not fits(hint, value)
    assert wanted(hint) == words
