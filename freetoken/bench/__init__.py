"""Drives the API and times it. No engine internals.

`text.py` has real text, `script.py` and `recording.py` turn it into prompts, `client.py` sends and takes the times,
`metrics.py` is the arithmetic, `sample.py` and `guard.py` watch the machine meanwhile, `run.py` puts it together.
"""
