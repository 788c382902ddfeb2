"""Gives a module on the meta device its values, on each rank its own rows.

In: a module, files or initialisers. Out: the same module, filled and sharded in place.
"""
