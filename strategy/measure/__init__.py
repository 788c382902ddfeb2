"""Finds the bytes and microseconds that operations and steps take, without data or by running an operation alone.

In: a symbol of a trace, or an optimizer. Out: layouts, bytes, FLOPs and time. Importing the package imports Thunder.
"""

from thunder_memsave import compat

compat.apply()
