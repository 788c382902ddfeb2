"""The fp8 linears of a module in a trace: their operators and gradients, their state, and whose kernels run.

In: the linears of a module. Out: bound symbols, and scales that an optimizer's step updates.
Importing the package imports Thunder.
"""

from thunder_memsave import compat

compat.apply()
