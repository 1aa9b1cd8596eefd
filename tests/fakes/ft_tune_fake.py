"""`ft` whose trials are arithmetic: `python -m tests.fakes.ft_tune_fake tune …`. Planner, study and storage are real.

A larger prefill chunk shortens the time to the first token and slows decoding a little, more slots speed it up.
`FT_FAKE_PAUSE_S` is what a start and a measurement take; `FT_FAKE_KILL_AT` the number of the measurement, from 1, in
which this `ft` kills itself; `FT_FAKE_GATE` a folder at which two of them wait for each other before the search.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from freetoken.cli.later import import_later
from freetoken.cli.main import main
from freetoken.tuner.values import Measurement, Outcome, Point


class ArithmeticLauncher:
    """In place of the launcher that starts engines."""

    can_resize = True

    def __init__(self, loaded: Any, site: Any, name: str, port: int, *, seed: int = 0, **_: Any) -> None:
        self.site, self.point = site, Point()
        self.measured = 0
        self.noise = random.Random(f"noise {seed} {os.getpid()}")
        self.pause_s = float(os.environ.get("FT_FAKE_PAUSE_S", "0"))
        if "FT_FAKE_GATE" in os.environ:
            self._wait_for_the_other(Path(os.environ["FT_FAKE_GATE"]))

    def _wait_for_the_other(self, gate: Path) -> None:
        gate.mkdir(exist_ok=True)
        (gate / str(os.getpid())).touch()
        deadline = time.monotonic() + 120
        while len(list(gate.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)

    def start(self, point: Point) -> Outcome:
        time.sleep(self.pause_s)
        return self.resize(point)

    def resize(self, point: Point) -> Outcome:
        self.point = dict(point)
        return Outcome(kind="ok")

    def measure(self, *, is_unseen: bool = False) -> Outcome:
        self.measured += 1
        if self.measured == int(os.environ.get("FT_FAKE_KILL_AT", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.pause_s)
        point, forecast = self.point, self.site.forecast(self.point)
        share = point["expert_slots"] / max(1, forecast.high)
        chunk = point["prefill_chunk_tokens"]
        decode_tps = (10 + 30 * share) * (1 - 0.05 * (chunk / 4096)) * (0.8 + 0.05 * point.get("cpu_threads", 1))
        ttft_s = 0.8 + 400 / chunk
        factor = 1 + self.noise.gauss(0, 0.001)
        measurement = Measurement(
            decode_tps=decode_tps * factor, ttft_s=ttft_s * factor, turn_time_s=(ttft_s + 500 / decode_tps) * factor,
            hit_ratio=min(1.0, 1.2 * share / (0.2 + share)), noise_ratio=0.004,
            peak_bytes=forecast.peak_at(point["expert_slots"]) + (3 << 20),
        )  # fmt: skip
        return Outcome(kind="ok", measurement=measurement)

    def stop(self) -> None:
        self.point = {}

    def settings_now(self) -> dict[str, Any]:
        return dict(self.point)


def install() -> None:
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    import_later()
    from freetoken.tuner import session

    session.DeployLauncher = ArithmeticLauncher  # type: ignore[assignment,misc]


if __name__ == "__main__":
    install()
    sys.exit(main())
