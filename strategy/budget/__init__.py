"""From a trace and a number of bytes to a plan that all ranks agree on.

In: a joint trace, what its operations take, and a budget. Out: the plan, the trace with it applied, and a simulation of
what then runs. Importing the package imports Thunder.
"""

from thunder_memsave import compat

compat.apply()
