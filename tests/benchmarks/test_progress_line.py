"""Progress of benchmarks: a line every ten seconds, the last one at the end."""

from __future__ import annotations

from benchmarks.harness.progress_line import Progress


def test_a_line_every_ten_seconds() -> None:
    said: list[str] = []
    now = 0.0
    progress = Progress("mixed, T = 0", 30, said.append, lambda: now)

    def work() -> None:
        nonlocal now
        now += 2.0

    for _ in range(30):
        progress.counted(work)()
    assert said[:3] == [
        "mixed, T = 0: 30 texts",
        "mixed, T = 0: 5 of 30 texts in 10 s, about 50 s left",
        "mixed, T = 0: 10 of 30 texts in 20 s, about 40 s left",
    ]
    assert said[-1] == "mixed, T = 0: 30 of 30 texts in 60 s" and len(said) == 7


def test_a_quick_run_says_its_begin_and_its_end() -> None:
    said: list[str] = []
    progress = Progress("edit, T = 1", 2, said.append, lambda: 0.0)
    progress.step()
    progress.step()
    assert said == ["edit, T = 1: 2 texts", "edit, T = 1: 2 of 2 texts in 0 s"]
