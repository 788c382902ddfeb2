"""The command `thunder-memsave chat`: a run in, answers of what it trained out, in the terminal.

`find_weights.py` finds what there is to load, `answering.py` generates with transformers, and `conversation.py` reads
what a user types.
"""
