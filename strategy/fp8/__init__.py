"""Linears that compute in fp8: recipes and scaling here; kernels, weights and the compiled linears in packages.

In: the `fp8` section. Out: the dtype and the scale of each tensor of a linear.

Frozen weights may be stored as numbers and scales alone: `weights/` makes and `sharding/quantized_parameter.py` holds
them, `frontend/fp8_linears.py` dequantises them (`compute/symbols.py`), and `checkpoints/module_state.py` checks them.
Another storage format changes each of these, `Fp8Config` in `config.py`, and what asks for `unquantized_dtype`: all
else in `sharding/`, `materialize/fill.py` and `frontend/capture.py`; `checkpoints/sources.py` and `finetune/export/`
know its files. `ops/unshard.py` gathers any dtype by rows. All of them take numbers to have the weight's shape, so a
format that packs several into a byte begins at `sharding/rows.py` (`whole_shape`).
"""
