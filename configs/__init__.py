"""YAML configurations, shipped as package data."""
