"""Plans the memory of a run on each device, without files, ranks or a GPU.

In: a `RunConfig` and a device. Out: a report, and an exit code that says whether the run fits.
"""
