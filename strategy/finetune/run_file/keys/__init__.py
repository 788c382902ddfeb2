"""Every key of a run file: its help, its names in other tools, and the key that an unknown one may mean.

In: names of keys. Out: text for the user.
"""
