"""The rest of Fabric's contract: processes, precision, state, forward methods, gradients that are not finite.

In: calls of Fabric's hooks, from `strategy.py`. Out: the same as with Fabric's own strategies, or a refusal by name.
"""
