"""The pass that overlaps collectives with computation, within a window and the room that a budget leaves.

In: a forward or a backward, and the window's bytes. Out: the same symbols reordered, small collectives joined.
"""
