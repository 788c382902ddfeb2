"""The frontend: turns a call of a module into a trace of ATen operators, which PyTorch differentiates.

In: a module, a method's name and the arguments of one call. Out: guards, and a trace of forward with the rule that
records its backward, or an error that names the user's line. `capture.py` makes the graph; `lowering.py` has the order
of all that is done to it, `rewrites/` among that.
Importing the package imports Thunder.
"""

from thunder_memsave import compat

compat.apply()
