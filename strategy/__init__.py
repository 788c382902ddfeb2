"""Lightning Fabric strategy that trains within a memory budget.

    configs/*.yaml - finetune/config --+
                                       +-- strategy.py (Fabric hooks, nothing else)
    Fabric(strategy=...) - config.py --+      | setup_module
                                              v
       sharding.py   parameters become shards, in place; process_group.py the groups of ranks,
                     transport.py their collectives, missing_ranks.py who gave no sign
       capture.py    module + first batch -> torch-level graph (Dynamo, guards kept)
       lowering.py   torch-level graph -> Thunder trace, unshard.py: one gather per parameter
       compile.py    captures per call; compile_trace.py: the one ordered list of passes
       planning.py   extract.py: joint trace -> storages and operations, each run once without data
                     planner/: an action for each storage, pure Python; agreed on by all ranks, cached on disk,
                     simulated on the traces that run
       passes/       trace -> trace, one file each: gather_dtype, regather, recompute, schedule, ...
                                              v
       one training step: forward, backward (accumulation.py), clip, optimizer (nonfinite.py)
                                              v
       recompute.py  `checkpoint`: the same for eager code, which no plan covers
       callbacks/    what watches the loop - checkpoints/ atomic, sharded, resumable

`import thunder_memsave` is cheap: it registers the strategy's name (`autoload.py`) and imports
PyTorch, Thunder and Lightning only when one of the public names is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from thunder_memsave.autoload import install as _install

if TYPE_CHECKING:
    from thunder_memsave.config import (
        CompileConfig,
        ConfigError,
        Fp8Config,
        MemoryConfig,
        ShardingConfig,
        StrategyConfig,
    )
    from thunder_memsave.errors import BudgetError, ThunderMemsaveError
    from thunder_memsave.materialize import load_on_setup
    from thunder_memsave.recompute import checkpoint
    from thunder_memsave.strategy import ThunderMemsaveStrategy

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CompileConfig",
    "ConfigError",
    "Fp8Config",
    "MemoryConfig",
    "ShardingConfig",
    "StrategyConfig",
    "ThunderMemsaveError",
    "ThunderMemsaveStrategy",
    "__version__",
    "checkpoint",
    "load_on_setup",
]

_HOME = {
    "BudgetError": "thunder_memsave.errors",
    "CompileConfig": "thunder_memsave.config",
    "ConfigError": "thunder_memsave.config",
    "Fp8Config": "thunder_memsave.config",
    "MemoryConfig": "thunder_memsave.config",
    "ShardingConfig": "thunder_memsave.config",
    "StrategyConfig": "thunder_memsave.config",
    "ThunderMemsaveError": "thunder_memsave.errors",
    "ThunderMemsaveStrategy": "thunder_memsave.strategy",
    "checkpoint": "thunder_memsave.recompute",
    "load_on_setup": "thunder_memsave.materialize",
}

_install()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'thunder_memsave' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
