"""Every key of a run file: its help, what other tools call it, and what an unknown one may have meant.

In: names of keys. Out: text for people.
"""
