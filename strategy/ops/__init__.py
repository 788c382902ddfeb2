"""Operations beside Thunder's own: each is a row of a table, with its derivative, what is saved and its kernels.

In: arguments as proxies of a trace. Out: bound symbols, and what runs for each of them.

To add one that PyTorch, or you, have a fused kernel for, such as RMS norm:

1. Write its row in the file of its family in `families/` (`norms.py`), or in a new file that `table.py` then lists.
   A row stands for one function of torch; nothing here joins several calls.
2. `functions`: those of torch that mean it; `lower`, where Thunder's own symbol is not what they mean.
3. `kernels`: a `Kernel`, and for its gradients `Derivative`s: what they read is saved. `scratch` is what a kernel
   allocates unseen by fake tensors; tensors that `run` makes with torch's operators are counted already.
   A symbol of your own needs an executor that never steps back, as `families/attention_kernels.py` has.
4. Add calls of it to `SAMPLES` in tests/harness/operations.py. tests/ops/test_table.py compares values, gradients,
   what is saved and scratch with PyTorch's, to the bit.
5. Nothing else but `frontend/autocast.py`, if autocast treats it in its own way: lowering, executors, measurements and
   replays of random numbers read the table.

What is made of Thunder's own operations needs no row, nor does what Thunder does not know: that runs as torch's own
operators (`aten_operators.py`) with torch's own derivative.

Importing the package imports Thunder with its work-arounds; so do the packages below that say so.
"""

from thunder_memsave import compat

compat.apply()
