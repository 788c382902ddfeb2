"""Operations of a trace: ATen operators as they are, and kernels of ours in rows of a table.

In: arguments as proxies of a trace. Out: bound symbols, and what runs for each of them.

What PyTorch can trace needs no row: each of its operators is an operation (`aten_operators.py`). What one of them
allocates unseen by fake tensors is a `Foreign` in `families/aten_scratch.py` that `FOREIGN` of `table.py` has: a bound
for devices that are not here; elsewhere it is measured (`measure/scratch.py`). To add a kernel that eager PyTorch does
not call, as for RMS norm:

1. Write a `Kernel` in the file of its family in `families/`, or in a new file that `table.py` then lists, and for its
   gradients `Derivative`s: what they read is saved. `scratch` is what a kernel allocates unseen by fake tensors;
   tensors that `run` makes with torch's operators are counted already. What Triton launches is in `launches/`.
2. Write its row, an `Operation`: the functions of torch that it stands for, and `run`, which has their arguments and
   returns `kernel_calls.call_kernel(...)`, or calls the function itself where the kernel does not apply. The
   row is found by the function in the captured graph; what is written as several functions becomes one in
   `frontend/rewrites/` first. Ask `cuda_device.py` for the device, which may be absent, and cast by
   `in_autocasts_dtype` where autocast does.
3. Add calls of it to `SAMPLES` in tests/harness/operations.py. tests/ops/test_table.py compares values, gradients,
   what is saved and scratch with PyTorch's, to the bit.

Importing the package imports Thunder with its work-arounds; so do the packages below that say so.
"""

from thunder_memsave import compat

compat.apply()
