"""The ranks: their groups, what they send each other, what they agree on, and who gave no sign.

In: PyTorch's process groups. Out: `DataParallel`, and collectives that name whom they waited for.
"""
