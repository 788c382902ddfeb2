"""Callbacks for any Fabric training loop."""
