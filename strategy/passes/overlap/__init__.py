"""The pass that lets collectives run beside computation, within a window and the room that a budget leaves.

In: a forward or a backward, and the bytes of its window. Out: the same symbols in another order, small ones joined.
"""
