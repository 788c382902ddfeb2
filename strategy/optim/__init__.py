"""Optimizers whose states take fewer bits, with the same bits on any number of ranks: `AdamW`, `Adam`, `SGD`.

In: parameters, or this rank's rows of them, and their gradients. Out: updated parameters; states by rows, which
checkpoints shard as they do parameters. docs/memory.md says what each format takes.
"""

from thunder_memsave.optim.adam import Adam, AdamW
from thunder_memsave.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW"]
