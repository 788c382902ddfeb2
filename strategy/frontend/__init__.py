"""The frontend: turns a call of a module into a Thunder trace.

In: a module, a method's name and the arguments of one call. Out: guards, and a trace checked against eager.
Importing the package imports Thunder.
"""

from thunder_memsave import compat

compat.apply()
