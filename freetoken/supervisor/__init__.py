"""Owns running engines: the keeper, process identity, logs. Knows nothing of any one engine."""
