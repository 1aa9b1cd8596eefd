"""`python -m freetoken` is the command `ft`."""

from freetoken.cli.main import main

if __name__ == "__main__":
    main()
