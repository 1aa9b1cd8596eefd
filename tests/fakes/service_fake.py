"""What a systemd unit runs, with the fake engine: `python -m tests.fakes.service_fake STATE NAME`."""

from __future__ import annotations

import sys

from freetoken import paths
from freetoken.supervisor.service import Service

if __name__ == "__main__":
    paths.set_state_dir(sys.argv[1])
    sys.exit(Service(sys.argv[2], apply_argv=(sys.executable, "-m", "tests.fakes.ft_fake")).run())
