"""The objective of a run: how the model is called, its loss, and what is measured of it.

In: batches that `data` laid out, and the model's output. Out: the model's arguments, a loss, its weight and metrics.
The model's call and the loss are one compiled graph, and one plan covers them (`loss_in_model.py`).

A new objective is a class in a file of its own here, a subclass of `Objective`: add its key to
`run_file/config.py`, read it in `choose.py`, and list it in `output/same_run.py`. Rows of another kind are a `RowSet`
that `data/prepare.py` makes. The model is called once per micro-batch, so a reference model's outputs come with the
rows (`run/reference.py`).
"""
