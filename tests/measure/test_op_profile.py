"""The key of an operation in files is the same in every process."""

from __future__ import annotations

import pytest
import torch
from thunder.core import dtypes

from thunder_memsave.measure.op_profile import text_of


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (1.5, "1.5"),
        ("mean", "'mean'"),
        (None, "None"),
        (slice(1, None, 2), "slice(1, None, 2)"),
        (torch.float32, "torch.float32"),
        (torch.device("cpu"), "device(type='cpu')"),
        (dtypes.float32, repr(dtypes.float32)),
        ({"b", "a", "c"}, "{'a','b','c'}"),
        (torch.nn.functional.gelu, "gelu"),
        (torch.Generator(), "Generator"),
        (object(), "object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_are_written_by_value_or_by_type_and_never_by_address(
    leaf: object, text: str
) -> None:
    assert text_of(leaf) == text
    assert "0x" not in text_of(leaf)
