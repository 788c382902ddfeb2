"""The processes of a run on this machine: started, signalled, and ended with a reason.

In: a number of devices, and signals. Out: processes, and `Stop` where a run is to end.
"""
