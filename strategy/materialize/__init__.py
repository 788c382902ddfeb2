"""From a module on the meta device to values, each rank its own rows.

In: a module, files or initialisers. Out: the same module, filled and sharded in place.
"""
