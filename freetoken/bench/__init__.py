"""Drives the API and times it. No engine internals."""
