"""Module names are read from the paths that Dynamo writes."""

from __future__ import annotations

import pytest

from thunder_memsave.ops.location import module_name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self']", ""),
        ("L['self'].model.layers.0.mlp", "model.layers.0.mlp"),
        (
            "L['self'].__dict__['_modules']['base_model'].__dict__['_modules']['model'].model.layers.3",
            "base_model.model.model.layers.3",
        ),
        ("L['self']._modules['head'].linear", "head.linear"),
    ],
)
def test_a_module_has_the_name_that_named_modules_gives(path: str, name: str) -> None:
    assert module_name({"first": ("L['self']", None), "last": (path, None)}) == name


def test_outside_of_modules_there_is_no_name() -> None:
    assert module_name(None) == module_name({}) == ""
