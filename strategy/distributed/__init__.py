"""Process groups, collectives, agreement between ranks, and errors that name lost ranks.

In: PyTorch's process groups. Out: `DataParallel`, and collectives whose errors name the ranks that they waited for.
"""
