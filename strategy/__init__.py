"""Lightning Fabric strategy that trains within a memory budget."""

__version__ = "0.1.0"
