"""Passes that let operations run on tiles of tokens: wide values such as those of MLPs, and losses."""
