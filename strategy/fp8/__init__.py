"""Linears that compute in fp8: recipes and scaling here; kernels, weights and the compiled linears in packages.

In: the `fp8` section. Out: the dtype and the scale of each tensor of a linear.

Frozen weights may be stored as numbers and scales alone: `weights/` makes and `sharding/quantized_parameter.py` holds
them, `frontend/fp8_linears.py` dequantises them (`compute/symbols.py`), and `checkpoints/module_state.py` checks them.
`stored_weights/` has the walk over the weights, and other formats, whose bytes have a shape of their own:
`StoredWeight` in `sharding/sharded_parameter.py` has the weight's. `frontend/graph_inputs.py` dequantises where a trace
reads them.
"""
