"""`ft` with the fake engine in place of the native one: `python -m tests.fakes.ft_fake ARGS`.

`FT_FAKE_LOG` names another target for the engine's log, `FT_FAKE_KILL_AT` a phase at which this `ft` kills itself.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from typing import Any

from freetoken.cli.later import import_later
from freetoken.cli.main import main


def install() -> None:
    # As `ft` itself starts, which matters where eight of them start at once.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    import_later()
    from freetoken.deploy import apply, overview
    from tests.fakes.fake_adapter import make_tools

    tools = make_tools(**({"log": os.environ["FT_FAKE_LOG"]} if "FT_FAKE_LOG" in os.environ else {}))
    apply.apply_recipe = functools.partial(_apply, apply.apply_recipe, tools)  # type: ignore[assignment]
    overview.read_overview = functools.partial(overview.read_overview, tools=tools)


def _apply(real: Any, tools: Any, *args: Any, progress: Any, **options: Any) -> Any:
    def watched(step: Any) -> None:
        progress(step)
        if step.phase == os.environ.get("FT_FAKE_KILL_AT"):
            os.kill(os.getpid(), signal.SIGKILL)

    return real(*args, progress=watched, tools=tools, **options)


if __name__ == "__main__":
    install()
    sys.exit(main())
