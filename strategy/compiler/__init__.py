"""The one list of steps from a captured call to callables, and running its result.

In: a trace of the frontend, and a plan of the budget. Out: a forward, and a backward for autograd.
Importing the package imports Thunder.
"""

from thunder_memsave import compat

compat.apply()
