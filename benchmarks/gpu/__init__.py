"""What a machine with one NVIDIA GPU is asked by `make gpu`: is it right, how fast is it, does the product work.

    machine.py    the device and the versions, or what is missing
    checks.py     a check, its outcome, and its three states
    processes.py  checks in processes of their own, with a time limit each
    models.py     models without files, and their steps
    kernels.py, losses.py, plans.py, fusion.py, system.py, fp8.py, fp8_casts.py, memory.py, offload.py
                                                                        the checks of `correct`
    rates.py, speed.py, anchors.py                                      the measurements of `speed`
    product.py    the command line
    report.py     one JSON and one Markdown table for each part

docs/gpu.md says what it has shown. `--device cpu` runs the same code on tiny shapes, as far as a CPU goes.
"""
