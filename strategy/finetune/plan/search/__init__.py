"""Searches what to run: changes of a run that fit, planned, the fastest first.

In: a run file, and the axes to search. Out: a table of runs (`table.py`), and the best as a run file (`best_file.py`).
`axes.py` lists the settings, `search.py` decides which are planned, `forecast.py` says how fast a plan is.
"""
