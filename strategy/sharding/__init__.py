"""Which rows of each parameter a rank holds, and what is computed with them outside of traces.

In: a module and the ranks that share it. Out: parameters that hold rows, gathered again where they are asked for.
"""
