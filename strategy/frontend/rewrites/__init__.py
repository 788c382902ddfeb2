"""The frontend's rewrites: what several nodes of a captured graph compute becomes the one call that means the same.

In: a graph of torch's functions and methods, as Dynamo captured it. Out: the same graph, changed in place.
"""
