"""Linears that compute in fp8: recipes, scaling state, backends, and their Thunder operators."""
