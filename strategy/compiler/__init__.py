"""The one list of steps from a captured call to callables, and running its result.

In: a trace of the frontend, and a plan of the budget. Out: a forward, and a backward for autograd. A call
enters each file once:

    compiled_module.py   a call that no earlier capture fits
          v
    compile_call.py      captured and lowered by frontend/
          v              state.py: the trace, and the facts that no step changes
    compile_trace.py     one step after the other; step_records.py, trace_files.py: what each left
          v
    pipeline.py          THE LIST
          |
          |  joint_steps.py   differentiate, claim            forward and backward are one trace
          |  passes/          keep_overwritten ... regather
          |  budget/          plan: tries plans, and does with each the steps marked * -> actions, room
          |  passes/          recompute *
          |  split.py         split *, check_gradients *      two traces
          |  passes/overlap/  schedule *
          |  split.py         keep_gradients *, add_gradients *, delete_last_used *
          |  fuse.py           fuse *                          before values are deleted; fusion/: by what rules
          |  run.py           run                             two callables
          v
    autograd.py          what then runs at each call of the module; cuda_graphs/: as two graphs, where asked for

    pieces/              where it ends in an error instead: eager code, and each submodule of it on this way

`explain_steps.py` prints the list as it was done. Importing the package imports Thunder.
"""

from thunder_memsave import compat

compat.apply()
