"""Operations beside Thunder's own: each is a row of a table, with its derivative, what is saved and its kernels.

In: arguments as proxies of a trace. Out: bound symbols, and what runs for each of them.

To add one that PyTorch, or you, have a fused kernel for, such as RMS norm:

1. Write its row in the file of its family (`norms.py`), or in a new file that `table.py` then lists.
2. `functions`: those of torch that mean it; `lower`, where Thunder's own symbol is not what they mean.
3. `kernels`: a `Kernel`, and for its gradients `Derivative`s: what they read is saved. `scratch` is memory inside.
4. Add calls of it to `SAMPLES` in tests/harness/operations.py. tests/ops/test_table.py compares values, gradients,
   what is saved and scratch with PyTorch's.
5. Nothing else: lowering, executors, measurements and replays of random numbers read the table.

Importing the package imports Thunder with its work-arounds; so do the packages below that say so.
"""

from thunder_memsave import compat

compat.apply()
