"""Thunder 0.2.6 passes the views of a changed tensor to `update_aliases` in the iteration order of a set.

That order depends on `PYTHONHASHSEED`, which differs between processes. So do the arguments, the names of the results
and everything compared or looked up by them: ranks of one run would disagree about what they compute
(`insert_alias_updates` in thunder/core/update_aliases.py; no report of it is known:
https://github.com/Lightning-AI/lightning-thunder/blob/main/thunder/core/update_aliases.py).

Delete this file when `tests/compat/test_ordered_alias_updates.py` says that Thunder does it itself.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from typing import Any

from packaging.version import Version


def is_needed() -> bool:
    """Return whether the installed version has the defect."""
    return Version(importlib.metadata.version("lightning-thunder")) <= Version("0.2.6")


def apply() -> None:
    """Sort the views of a tensor by name for both functions that iterate over them."""
    if not is_needed():
        return
    from thunder.core import update_aliases

    new_aliases, update = update_aliases._get_new_aliases, update_aliases._get_update_bsym

    def get_new_aliases(aliases: Iterable[Any], trace: Any) -> Any:
        return new_aliases(_sorted(aliases), trace)

    def get_update_bsym(group: Iterable[Any], swap_map: Any, aliases: Any) -> Any:
        return update(_sorted(group), swap_map, aliases)

    update_aliases._get_new_aliases = get_new_aliases
    update_aliases._get_update_bsym = get_update_bsym


def _sorted(variables: Iterable[Any]) -> list[Any]:
    return sorted(variables, key=lambda variable: str(variable.proxy.name))
