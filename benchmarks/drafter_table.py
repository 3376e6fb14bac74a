"""Rows of the drafter benchmark: as a table, and merged into a results file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FORCED = ("edit", "repeat")  # workloads whose text is forced on the target
NOTE = (
    "The tokens of `edit` and `repeat` are forced on the target, which does not copy by itself. The target and the "
    "drafters do all their work, and drafters see committed tokens only. A draft model is not measured there: it "
    "applies a request's forced tokens, as all logits processors, and would know the text."
)
OWN_RUN = "measured"
"""Key in a row that was measured in its own run, with the machine, date and conditions of that run."""


def key_of(row: Mapping[str, Any]) -> tuple[str, float, str]:
    """Returns the key that identifies a row of a file."""
    return row["workload"], row["temperature"], row["drafter"]


def merged(before: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of a results file with these rows in place of earlier ones of the same methods.

    Args:
        before: The contents of the file. Its `environment` describes the rows without their own run.
        rows: New rows.
        facts: Machine, date and conditions of the new rows, stored in each of them.
    """
    kept = [*before["rows"]]
    for row in rows:
        own = {**row, OWN_RUN: dict(facts)}
        at = next((at for at, each in enumerate(kept) if key_of(each) == key_of(row)), None)
        if at is not None:
            kept[at] = own
            continue
        beside = [at for at, each in enumerate(kept) if key_of(each)[:2] == key_of(row)[:2]]
        kept.insert(beside[-1] + 1 if beside else len(kept), own)
    return {**before, "rows": kept}


def _cell(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


def own_runs(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns one line per run that measured some rows alone: methods, date and machine."""
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        facts = row.get(OWN_RUN)
        if facts:
            run = f"{facts['date']}, {facts['cpu']}, {facts['cores']} cores, {facts['isa']}"
            runs.setdefault(run, []).append(row)
    names = {run: ", ".join(dict.fromkeys(row["drafter"] for row in own)) for run, own in runs.items()}
    return [f"{names[run]}: {run}{_again('; a', own)}" for run, own in runs.items()]


def _again(start: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the speed ratio of two equal engines in a run, which shows how steady the machine was."""
    again = [row["plain_again"] for row in rows if "plain_again" in row]
    words = f"{start} second engine without drafts: "
    return f"{words}{min(again):.2f} to {max(again):.2f} of the first one's speed." if again else ""


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [
        "| workload | drafter | T | tau | speed / plain | speed / HF assisted | speed / tau | drafting | copied | "
        "distinct-4 | identical | published |",
        "|" + "---|" * 12,
    ]
    for row in rows:
        lines.append(
            f"| {row['workload']} | {row['drafter']} | {row['temperature']:g} | {row['tau']:.2f} | "
            f"{row['speed_vs_plain']:.2f} | {_cell(row['speed_vs_assisted'])} | {row['efficiency']:.2f} | "
            f"{row['drafting_share']:.3f} | {row['copied_share']:.2f} | {row['distinct_4']:.2f} | "
            f"{_cell(row['identical'], '')} | {row['published']} |"
        )
    if any(row["workload"] in FORCED for row in rows):
        lines += ["", NOTE]
    again = _again("A", [row for row in rows if OWN_RUN not in row])
    if again:
        lines += ["", again]
    runs = own_runs(rows)
    if runs:
        lines += ["", "Measured in runs of their own, beside plain decoding in the same run:", ""]
        lines += [f"- {run}" for run in runs]
    return "\n".join(lines)
