"""Every test starts alike; one that leaves something behind fails, and it is cleaned up."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Before any import of a library that reads them: no hub is asked, and ranks share two cores.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
import torch.distributed as dist

from thunder_memsave import compat

compat.apply()  # before a test module imports thunder

# Plans and measurements of a test are no other run's; processes that it starts see them.
_CACHE = tempfile.TemporaryDirectory(prefix="thunder_memsave-")
os.environ["THUNDER_MEMSAVE_CACHE"] = _CACHE.name

_LONG_FILES = (
    "finetune/run/test_train.py",
    "budget/test_planning_on_ranks.py",
    "finetune/run/test_stop.py",
    "budget/test_memory_planner.py",
    "finetune/run/test_fp8_run.py",
    "faults/test_random_kills.py",
    "finetune/run/test_fp8_shown.py",
    "conformance/test_sharding_parity.py",
    "budget/test_extract.py",
    "passes/test_on_ranks.py",
    "passes/test_recompute_on_ranks.py",
    "budget/test_other_processes.py",
    "fabric/test_strategy_launch.py",
    "finetune/run/test_checkpoint_section.py",
    "finetune/run/test_copied_runs.py",
    "mxfp4/test_mxfp4_steps.py",
)
"""Files whose tests take longest, about 3 minutes to half a minute of one core."""

# Libraries write these for the rest of the process, and reading them again changes nothing.
_SET_BY_LIBRARIES = (
    "CUDA_MODULE_LOADING",  # torch.cuda, once CUDA is initialised
    "KMP_",  # OpenMP's own registration
    "PL_GLOBAL_SEED",  # seed_everything
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # lightning.fabric, at import
    "PL_SEED_WORKERS",
    "PYTEST_",
    "TORCHINDUCTOR_CACHE_DIR",  # torch.compile
    "TRITON_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",  # inductor, for each kernel that it loads
)


def pytest_collection_finish() -> None:
    """Let Python's collector not look at what imports have made, which is most of what there is."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _what_stays_is_not_looked_at_again() -> Iterator[None]:
    """The same for what the tests of a file leave in caches."""
    yield
    gc.collect()
    gc.freeze()


@dataclass(frozen=True, kw_only=True)
class TorchState:
    """What torch keeps for the whole process."""

    default_dtype: torch.dtype
    grad_mode: bool
    deterministic_algorithms: bool
    autocast: bool
    process_group: bool

    @classmethod
    def read(cls) -> TorchState:
        return cls(
            default_dtype=torch.get_default_dtype(),
            grad_mode=torch.is_grad_enabled(),
            deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
            autocast=torch.is_autocast_enabled("cpu"),
            process_group=dist.is_initialized(),
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let pytest-xdist's workers begin with long files: what begins last keeps one of them waiting for the other."""
    if hasattr(config, "workerinput"):
        places = {Path(__file__).parent / file: n for n, file in enumerate(_LONG_FILES)}
        items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(autouse=True)
def _same_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed every generator, use one thread, and keep files out of the checkout."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _no_leaked_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    leaked = sorted(key for key in changed if not key.startswith(_SET_BY_LIBRARIES))
    os.environ.clear()
    os.environ.update(before)
    assert not leaked, f"the test leaves environment variables changed: {leaked}"


@pytest.fixture(autouse=True)
def _no_leaked_torch_state() -> Iterator[None]:
    before = TorchState.read()
    yield
    after = TorchState.read()
    torch.set_default_dtype(before.default_dtype)
    torch.set_grad_enabled(before.grad_mode)
    torch.use_deterministic_algorithms(before.deterministic_algorithms)
    torch.set_autocast_enabled("cpu", before.autocast)
    if dist.is_initialized():
        dist.destroy_process_group()
    assert after == before, f"the test leaves torch as {after}, it was {before}"


@pytest.fixture(autouse=True)
def _no_leaked_threads_or_processes() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
        child.join()
    new = [t for t in threading.enumerate() if t not in before and not t.daemon]
    for thread in new:
        thread.join(timeout=1)  # transformers ends the threads that load weights without waiting
    threads = [thread.name for thread in new if thread.is_alive()]
    assert not children, f"the test leaves processes running: {children}"
    assert not threads, f"the test leaves threads running: {threads}"
