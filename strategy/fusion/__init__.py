"""Runs of elementwise operators of the traces that run, each compiled to one kernel with the same bits.

`operators.py` says which operators may be in a run, `runs.py` cuts the traces, `region.py` is what a run becomes, and
`inductor.py` compiles it.
"""

from thunder_memsave import compat

compat.apply()
