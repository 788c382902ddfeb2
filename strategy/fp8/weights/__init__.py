"""Which linears compute in fp8, and their weights as fp8 numbers: cast, loaded and sharded by rows.

In: a module. Out: the same module, with fp8 numbers and a scale in place of weights that are not trained.
"""
