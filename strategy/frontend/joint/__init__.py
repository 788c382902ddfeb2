"""Lowers to torch's own operators, with torch's own derivative.

In: the function of one node (`one_call.py`), or of a whole graph (`frontend/whole_graph.py`). Out: symbols of a Thunder
trace, one for each ATen operator of the joint graph (`aten/joint_graph.py`).
"""
