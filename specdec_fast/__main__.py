"""The program: the script `specdec`, and `python -m specdec_fast`. Tests: tests/commands/test_root.py."""

from __future__ import annotations

import sys


def run() -> None:
    """The command line; Ctrl-C while that is being imported, before any command runs, ends it in one line too."""
    try:
        from specdec_fast.cli import main

        main()
    except KeyboardInterrupt:
        print("specdec: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    run()
