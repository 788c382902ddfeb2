"""The data of preference tuning: pairs of a chosen and a rejected text, and texts that are desirable or not.

In: documents, which `../pair_documents.py` makes of rows. Out: examples of token samples, laid into rows whose batches
have what `objectives/preference.py` reads.
"""
