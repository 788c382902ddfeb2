"""The names of what happens to a trace, and why most of it may not be left out; `compiler/pipeline.py` does it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from thunder_memsave.settings.problems import ConfigError, suggestion

_THUNDER = "Thunder's steps after it need it"
_PLAN = "the plan counts on it; `memory.policy: keep_all` computes nothing again but what is free"
_BACKWARD = "without it there is no backward to run"

WHY_NEEDED: Mapping[str, str] = MappingProxyType(
    {
        "wrap_results": _THUNDER,
        "drop_unread": _THUNDER,
        "differentiate": _BACKWARD,
        "claim": "what no executor has claimed cannot run",
        "keep_overwritten": "without it, backward reads what forward has written over",
        "leave_out_zeros": "",
        "join_views": "",
        "merge_equal": "",
        "gather_in_compute_dtype": "",
        "gather_in_fp8": "",
        "add_embedding_gradients": "",
        "fetch_weights": "no kernel of a device reads weights on the host; leave `memory.offload_weights` out instead",
        "tile_rows": "",
        "regather": "",
        "plan": "without it, nothing keeps the step within `memory.budget`; `memory.policy` has other plans",
        "recompute": _PLAN,
        "recompute_in_kernels": "",
        "compress": "the plan counts on it; `memory.compress: none` stores nothing in fp8",
        "split": _BACKWARD,
        "check_gradients": "without it, a gradient may be missing without a word",
        "schedule": "",
        "keep_gradients": "without it, gradients are reduced inside `fabric.no_backward_sync`",
        "add_gradients": "",
        "update_in_place": "",
        "fuse": "`strategy.fusion: false` leaves it out",
        "offload": "the plan counts on it; `memory.offload: none` copies nothing to the host",
        "write_in_place": "",
        "delete_last_used": "without it, the step holds all that it computes, whatever the plan says",
        "unwrap_results": "what runs without gradients returns its results alone",
        "run": "without it, nothing runs",
    }
)
"""In order. Empty: results are correct without it."""


def refuse_needed(names: Sequence[str], *, key: str) -> Iterator[ConfigError]:
    """Yield a problem for each of the names that is none, or that of a step that may not be left out."""
    optional = ", ".join(name for name, why in WHY_NEEDED.items() if not why)
    others = f"The steps that can be left out are {optional}."
    for name in names:
        if name not in WHY_NEEDED:
            nearest = suggestion(name, WHY_NEEDED)
            yield ConfigError(
                f"{key} has {name!r}, but no step is called so{nearest} {others}", key=key
            )
        elif why := WHY_NEEDED[name]:
            yield ConfigError(
                f"{key} has {name!r}, which cannot be left out: {why}. {others}", key=key
            )
