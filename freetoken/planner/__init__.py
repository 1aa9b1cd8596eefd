"""Bytes arithmetic: will it fit, with which settings, how fast. Pure: no torch, files, clocks or processes."""
