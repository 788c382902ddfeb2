"""States of a rank's random number generators, as plain data that a safe reader accepts."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """Collect the states of Python, NumPy, torch and, on a CUDA device, its generator."""
    name, keys, *rest = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).copy()), *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def seed_from(state: dict[str, Any], *, rank: int, world_size: int) -> None:
    """Seed every generator from some rank's collected state: differently on each rank, the same each time.

    For ranks of which no state was collected. The seed is the first 8 bytes of the SHA-256 of the state of
    torch's CPU generator and of `"<rank> of <world_size>"`, as a little-endian number.
    """
    origin = state["torch"].numpy().tobytes() + f"{rank} of {world_size}".encode()
    seed = int.from_bytes(hashlib.sha256(origin).digest()[:8], "little")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # of CUDA too


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the collected state of every generator."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
