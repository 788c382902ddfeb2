from __future__ import annotations

import pytest

from thunder_memsave.finetune.run_file.reading.arguments import split_arguments


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--out=a=b"], [("--out", "a=b")]),
        (["--out", "a=b", "c"], [("--out", "a=b"), ("c", None)]),
        (["lora.r=4"], [("lora.r", "4")]),
        (["--out", "--merge", "run"], [("--out", None), ("--merge", None), ("run", None)]),
        (["--merge=no", "--out"], [("--merge", "no"), ("--out", None)]),
        (["-c", "run.yaml"], [("-c", None), ("run.yaml", None)]),
        (["--lr", "-1"], [("--lr", "-1")]),
        (["--out="], [("--out", "")]),
        (["--", "x"], [("--", "x")]),
        ([], []),
    ],
)
def test_an_option_has_the_value_after_its_equals_sign_or_the_next_word(
    words: list[str], expected: list[tuple[str, str | None]]
) -> None:
    found = list(split_arguments(words, flags=("--merge",)))
    assert [(each.name, each.value) for each in found] == expected
    assert [word for each in found for word in each.typed] == words
