"""`python -m freetoken` is the command `ft`."""

import signal


def main() -> None:
    """Runs `ft`. Ctrl-C while its modules still load ends it by the signal, without a traceback."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from freetoken.cli.main import main as run

    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, usual)
    run()


if __name__ == "__main__":
    main()
