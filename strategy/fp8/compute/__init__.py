"""The fp8 linears of a module in a trace: operators and gradients, scaling state, and the choice of a backend.

In: the linears of a module. Out: bound symbols, and scales that an optimizer's step updates.
Importing the package imports Thunder.
"""

from thunder_memsave import compat

compat.apply()
