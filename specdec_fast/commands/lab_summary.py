"""What `specdec lab` prints when it ends. Tests: tests/commands/test_lab.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from specdec_fast.commands.json_output import print_json

if TYPE_CHECKING:
    from rich.console import Console

    from specdec_fast.lab.run import Lab


def finish(run: Lab, as_json: bool, console: Console) -> None:
    """Writes the report and prints its summary.

    Args:
        run: The measurements.
        as_json: Whether JSON is printed.
        console: Console for failures.

    Raises:
        Exit: With status 1 if a check failed.
    """
    from specdec_fast.lab.report import finite, write_report

    page = write_report(run)
    failures = run.failures
    if as_json:
        print_json(finite(run.as_dict()))
    else:
        for line in _summary(run):
            print(line)
        print(f"report: {page}")
    for line in failures:
        console.print(f"specdec: {line}", soft_wrap=True)
    if failures:
        raise typer.Exit(1)


def _summary(run: Lab) -> Iterator[str]:
    """Yields the lines of the summary."""
    from specdec_fast.commands.terminal_output import counted
    from specdec_fast.lab.run import LEVEL

    if run.exact:
        worst = max(each.error for each in run.exact)
        yield f"exact: {len(run.exact)} distributions enumerated, largest error {worst:.1e}"
        yield f"closed forms: {len(run.expected)}, same keys: {sum(each.compared for each in run.agreement):,} rows"
    if run.greedy:
        same = sum(each.identical for each in run.greedy)
        yield f"greedy: {same} of {len(run.greedy)} texts identical"
    for row in run.summaries:
        name = row.get("place", f"context {row.get('context')}")
        yield f"{name}: {row['draws']:,} draws, distance at most {row['certified_distance']:.4f} (99.9%)"
    if run.summaries:
        yield "distance: an upper bound at this confidence, no estimate; more draws make it smaller"
    if run.judged:
        lowest = min(each.test.p_value for each in run.judged)
        rejected = sum(each.rejected for each in run.judged)
        bound = f"rejected below {LEVEL / len(run.judged):.2g}"
        yield f"tests: {len(run.judged)}, {rejected} rejected, smallest p {lowest:.3g} ({bound})"
    if run.mutants:
        killed = sum(each.killed for each in run.mutants)
        yield f"mutants: {killed} of {len(run.mutants)} killed; planted in the engine: {len(run.planted)} checks"
    if run.ledger is not None:
        yield f"ledger: {counted(run.ledger.runs, 'run')}, ln E = {run.ledger.log_total():.2f}"
    for note in run.notes:
        yield f"note: {note}"
