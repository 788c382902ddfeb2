"""The model that is trained: where its files come from, how it is built, its adapters."""
