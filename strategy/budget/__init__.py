"""From a trace and a number of bytes to a plan that all ranks agree on: the step `plan` of `compiler/pipeline.py`.

In: a joint trace, what its operations take, a budget, and the steps that carry a plan out. Out: the plan's actions and
room. A call comes through each file once:

    memory_planner.py    try plans until one fits on all ranks
      way_search.py      whole, in tiles, with values in fp8: the ways that it tries (ways/)
      extract.py         the trace -> a graph of what each operation takes; pins.py: what the user decides
      plan_request.py    the graph and a number of bytes -> a plan (planner/, or plan_cache.py)
      planned_call.py    the plan -> the traces that would run, by the steps
      running_program.py those traces -> what each operation frees, for the simulation

`target/` stands in for a device, and ranks, that are not here. Importing the package imports Thunder.
"""

from thunder_memsave import compat

compat.apply()
