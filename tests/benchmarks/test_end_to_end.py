"""Settings are measured by processes of their own, which end with the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

START = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from benchmarks.end_to_end import _end_with_parent
if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=_end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 60).result()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_a_worker_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", START], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    try:
        parent.communicate(timeout=20)  # until nobody can write any more, the worker either
    except subprocess.TimeoutExpired:
        os.kill(worker, signal.SIGKILL)
        pytest.fail("the worker went on for 20 seconds")
