"""The data of a run: the formats that a run file names, and the types of a user-defined format.

In: JSONL, JSON, CSV, Parquet, Arrow and text. Out: documents, tokens, rows of one length and batches.
`prepare.py` makes the rows; the loop and objectives need `row_set.py` alone.
"""

from thunder_memsave.finetune.data.data_files import DataFiles
from thunder_memsave.finetune.data.documents import Dataset, DataSplit, Document, Part
from thunder_memsave.finetune.data.formats import (
    ChatJSONL,
    PlainText,
    PromptJSONL,
    TextJSONL,
)

__all__ = [
    "ChatJSONL",
    "DataFiles",
    "DataSplit",
    "Dataset",
    "Document",
    "Part",
    "PlainText",
    "PromptJSONL",
    "TextJSONL",
]
