"""The frontend's rewrites: what several nodes of a captured graph compute becomes the one call that means the same.

In: a graph of torch's functions and methods, as Dynamo captured it. Out: the same graph, changed in place.

A new one is a function in a file of its own here, called in `lower` of `lowering.py`, which has the order. It reads
nodes by `nodes.py`, touches no storage in `changed`, and keeps eager's bits, of gradients too. What runs instead, if it
is a kernel of ours, is a row of `ops/`.
"""
