"""Starts `precise_engine.py` in its own process."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx

PROGRAM = Path(__file__).with_name("precise_engine.py")


@contextmanager
def run_precise_engine(*arguments):
    """The base URL of a fake engine that ends with the block."""
    process = subprocess.Popen([sys.executable, str(PROGRAM), *map(str, arguments)], stdout=subprocess.PIPE)
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def read_truth(base_url):
    """What the engine did: for each answer when it was received, and its first and last token sent."""
    return httpx.get(f"{base_url}/truth", trust_env=False).json()


def read_prompts(base_url):
    """Every prompt it was sent."""
    return httpx.get(f"{base_url}/prompts", trust_env=False).json()
