"""PyTorch's own operators: traces a function with its derivative to them, and watches what they allocate and compute.

In: a function, or code that runs, also on fake tensors. Out: a graph of forward and backward (`joint_graph.py`;
`whole_calls.py`: what stays whole in it), or bytes live at each moment and FLOPs (`record.py`).
"""
