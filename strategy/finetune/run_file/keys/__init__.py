"""Every key of a run file: its help, from `config.py`'s docstrings, its names in other tools, and what a typo may mean.

In: names of keys. Out: text for the user.
"""
