"""Knobs to Optuna: finds the fastest setting that fits."""
