"""The training loop and its parts: evaluation, guards, optimizer, learning rate.

In: batches, a model and an optimizer. Out: optimizer steps, losses and the loop's state.
"""
