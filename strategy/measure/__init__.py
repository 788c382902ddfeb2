"""What operations and steps take: bytes and microseconds, found without data or measured alone.

In: a symbol of a trace, or an optimizer. Out: its layouts, bytes, work and time. Importing the package imports Thunder.
"""

from thunder_memsave import compat

compat.apply()
