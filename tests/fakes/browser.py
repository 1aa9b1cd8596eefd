"""Headless Chromium: a page's DOM once its scripts have run, and every request that the page made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome-stable", "google-chrome")


def find_browser() -> str:
    """The browser; skips the test, with the reason, where there is none."""
    for name in NAMES:
        if (found := shutil.which(name)) is not None:
            return found
    pytest.skip(f"no browser here: none of {', '.join(NAMES)} (Debian: `apt-get install chromium`)")


def read_dom(page: Path, folder: Path, *, budget_ms: int = 20_000) -> tuple[str, list[str]]:
    """The DOM of the file `page` after its scripts ran, and the addresses that the page asked for.

    The browser's own log of its network tells who began a request: what it asks its maker for is not the page's
    doing. No request leaves the machine, whoever makes it: the proxy that all of them go through is a closed port.
    """
    log = folder / "net.json"
    done = subprocess.run(
        [find_browser(), "--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         *(["--no-sandbox"] if os.geteuid() == 0 else []), f"--user-data-dir={folder / 'profile'}",
         "--proxy-server=127.0.0.1:9", "--proxy-bypass-list=<-loopback>", f"--log-net-log={log}",
         f"--virtual-time-budget={budget_ms}", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=240, env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, list_requests(log)


def list_requests(log: Path) -> list[str]:
    """Addresses that a page asked for, off the browser's network log; what the browser began itself left out."""
    document = json.loads(log.read_text(encoding="utf-8"))
    begun = document["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    told = [event.get("params", {}) for event in document["events"] if event["type"] == begun]
    return [one["url"] for one in told if "url" in one and one.get("initiator") != "not an origin"]


class Drawn(HTMLParser):
    """What stands inside every element of class `plot`: by its id, how many elements have each class."""

    VOID = frozenset({"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.counts: dict[str, dict[str, int]] = {}
        self.texts: dict[str, str] = {}
        self._stack: list[tuple[str, str | None]] = []
        self.feed(text)

    @property
    def _plot(self) -> str | None:
        return self._stack[-1][1] if self._stack else None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        classes = (attributes.get("class") or "").split()
        plot = self._plot
        if plot is None and "plot" in classes:
            plot = attributes.get("id") or ""
            self.counts[plot] = {}
        elif plot is not None:
            for name in (tag, *classes):
                self.counts[plot][name] = self.counts[plot].get(name, 0) + 1
        if tag not in self.VOID:
            self._stack.append((tag, plot))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self._stack.pop()

    def handle_endtag(self, tag: str) -> None:
        while self._stack:
            if self._stack.pop()[0] == tag:
                return

    def handle_data(self, data: str) -> None:
        if self._plot is not None:
            self.texts[self._plot] = self.texts.get(self._plot, "") + data
