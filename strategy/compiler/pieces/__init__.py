"""In: a method that cannot be one graph. Out: its result, from eager code that calls compiled submodules.

`piecewise_module.py` decides and remembers, `run_pieces.py` runs (docs/decisions/0019).
"""
