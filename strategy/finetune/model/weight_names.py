"""Maps a model's names to those in its weight files, where transformers has renamed or stacked weights since."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from thunder_memsave.checkpoints.sources import TensorSource
from thunder_memsave.materialize.stacked_source import Stack, StackedSource
from thunder_memsave.settings.problems import ConfigError

_KEY = "model.name_or_path"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredNames:
    """Where a model's weights are in its files."""

    of: Mapping[str, str]
    """Name in the model -> name in the files, or in `source`."""
    stacks: Mapping[str, Stack] = field(default_factory=dict)
    """Name in the model, which is the name in `source` -> the parts in the files."""

    def source(self, files: TensorSource) -> TensorSource:
        """Return a source of the files that has stacks under their names in the model."""
        return StackedSource(files, self.stacks) if self.stacks else files


def stored_names(model: Any, stored: Iterable[str]) -> StoredNames:
    """Map the model's names to those in its files, as transformers' own loading does.

    Weights of experts that files hold one by one are stacks: of one of them, or of two, one after the other.

    Args:
        model: A transformers model, without an adapter.
        stored: The names in the files.

    Raises:
        ConfigError: the files hold tensors that transformers converts in another way, or lack parts of a stack.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    known = model.state_dict(keep_vars=True)
    names: dict[str, str] = {}
    parts: dict[str, dict[tuple[int, int], str]] = defaultdict(dict)
    for name in stored:
        own, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, known
        )
        if pattern is None or own == name:
            names[own] = name
        else:
            parts[own][_place(name, pattern, converters, own, model)] = name
    stacks = {own: _stack(own, found, model) for own, found in parts.items() if own in known}
    return StoredNames(of={**names, **{own: own for own in stacks}}, stacks=stacks)


def _place(
    name: str, pattern: str, converters: Sequence[WeightConverter], own: str, model: Any
) -> tuple[int, int]:
    """Return a part's row in its stack, and its place in that row."""
    (converter,) = [each for each in converters if pattern in each.source_patterns][:1]
    match = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
    if match is None or not _stacks_experts(converter):
        raise ConfigError(
            f"{_KEY}: the files of this model ({model.config.model_type}) hold {name!r}, of which transformers makes "
            f"a part of {own!r} when it loads them, in a way that is not known here. Use a model of another kind.",
            key=_KEY,
        )
    return int(match[1]), list(converter.source_patterns).index(pattern)


def _stacks_experts(converter: WeightConverter) -> bool:
    """Tell whether a converter stacks tensors, and before that at most puts several one after the other."""
    kinds = [(type(each), each.dim) for each in converter.operations if hasattr(each, "dim")]
    is_known = len(kinds) == len(converter.operations)
    joined = [(MergeModulelist, 0), (Concatenate, 1)]
    return is_known and kinds in (joined, joined[:1]) and "*" in converter.source_patterns[0]


def _stack(own: str, found: Mapping[tuple[int, int], str], model: Any) -> Stack:
    num_rows, num_parts = (1 + max(place[i] for place in found) for i in (0, 1))
    if len(found) != num_rows * num_parts:
        raise ConfigError(
            f"{_KEY}: the files of this model ({model.config.model_type}) hold {len(found)} parts of {own!r}, but not "
            f"all {num_parts} of each of its {num_rows} experts; get the model again.",
            key=_KEY,
        )
    rows = range(num_rows)
    return Stack(tuple(tuple(found[row, part] for part in range(num_parts)) for row in rows))
