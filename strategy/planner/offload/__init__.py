"""Values of forward that wait for backward on the host: their copies, when these run, and which values to choose.

In: the program of a plan, costs, and the device's rates. Out: the same with copies, where each begins and ends, and the
time of the step on a timeline of three engines.
"""
