"""The training loop and its parts.

In: batches, a model and an optimizer. Out: optimizer steps, losses and the loop's state.
"""
