"""Operations beside Thunder's own: a new operation goes here, with its derivative and its kernels.

In: arguments as proxies of a trace. Out: bound symbols, and what runs for each of them.
Importing the package imports Thunder with its work-arounds; so do the packages below that say so.
"""

from thunder_memsave import compat

compat.apply()
