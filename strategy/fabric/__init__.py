"""The rest of Fabric's contract: processes, precision, state, forward methods, non-finite gradients.

In: Fabric's hook calls, from `strategy.py`. Out: what Fabric's own strategies do, or an error that says what to use.
"""
