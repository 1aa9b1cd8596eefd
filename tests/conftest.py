"""What holds for every test: Ctrl-C works however pytest was started."""

import signal

# A shell starts what runs in the background with SIGINT ignored, and every process of a test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
