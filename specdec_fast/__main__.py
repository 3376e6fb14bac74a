"""The program: the script `specdec`, and `python -m specdec_fast`. Tests: tests/commands/test_root.py."""

from __future__ import annotations

import os
import signal
import sys

_INTERRUPTED = 130


def run() -> None:
    """The command line; Ctrl-C while that is being imported, before any command runs, ends it in one line too.

    A further Ctrl-C while the interpreter ends has the same status: unhandled, it would end the program by the signal.

    Raises:
        SystemExit: With the exit status of the command.
    """
    try:
        from specdec_fast.cli import main

        main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
        print("specdec: interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
        raise


if __name__ == "__main__":
    run()
