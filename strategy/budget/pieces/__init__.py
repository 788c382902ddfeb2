"""In: a step that runs in pieces, measured once. Out: the bytes that each piece's plan may take (docs/decisions/0027).

`measured_step.py` follows a step, `call_bytes.py` says what a piece's plan takes, `pieces_budget.py` gives each its
share.
"""
