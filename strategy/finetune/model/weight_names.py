"""Maps a model's names to those in its weight files, where transformers has renamed weights since."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from thunder_memsave.settings.problems import ConfigError


def stored_names(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """Map the model's names to those in its files, as transformers' own loading does.

    Args:
        model: A transformers model, without an adapter.
        stored: The names in the files.

    Raises:
        ConfigError: the files hold tensors that transformers merges when it loads them.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    known = model.state_dict(keep_vars=True)
    names = {}
    for name in stored:
        own, converted = rename_source_key(
            name, renamings, converters, model.base_model_prefix, known
        )
        if converted is not None and own != name:
            raise ConfigError(
                f"model.name_or_path: the files of this model ({model.config.model_type}) hold "
                f"{name!r}, of which transformers makes a part of {own!r} when it loads them; this "
                "version reads tensors as they are stored. Use a model of another kind.",
                key="model.name_or_path",
            )
        names[own] = name
    return names
