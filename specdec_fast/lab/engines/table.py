"""Keeps rows about engines in a file, and shows them as tables. Tests: tests/lab/engines/test_table.py."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec_fast.lab.engines.verdict import DID_NOT_RUN, LEVEL

RESULTS = "engines.json"
_HEADINGS = ("setting", "sampling", "TV (limit)", "first token", "p", "verdict", "greedy", "seeds", "batch")


def key_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns what a row is about: engine, version, setting and sampling."""
    version = str(row["versions"].get(row["engine"], ""))
    return (str(row["engine"]), version, str(row["setting"]), json.dumps(row["sampling"], sort_keys=True))


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Reads the rows of a folder.

    Args:
        folder: Folder of earlier runs.

    Returns:
        The rows; none if the folder has no results.

    Raises:
        ValueError: If the file is not one of this command.
    """
    path = folder / RESULTS
    if not path.exists():
        return []
    try:
        return list(json.loads(path.read_text())["rows"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"--out: {path} is no result of `specdec lab --engine`; use another folder") from None


def add_rows(folder: Path, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Stores rows in a folder. A row replaces an earlier one about the same.

    Args:
        folder: Folder of the results.
        rows: New rows.

    Returns:
        All rows of the folder.
    """
    kept = {key_of(row): dict(row) for row in read_rows(folder)}
    kept |= {key_of(row): dict(row) for row in rows}
    folder.mkdir(parents=True, exist_ok=True)
    found = list(kept.values())
    part = folder / f"{RESULTS}.part"
    part.write_text(json.dumps({"rows": found}, indent=1) + "\n")
    part.replace(folder / RESULTS)
    (folder / "engines.md").write_text(as_markdown(found) + "\n")
    return found


def as_markdown(rows: Sequence[Mapping[str, Any]], above: str = "") -> str:
    """Shows rows as one table per engine and version.

    Args:
        rows: Rows of `Row.as_dict`.
        above: A line above each table, such as the source of its numbers.

    Returns:
        Markdown.
    """
    tables: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        tables.setdefault(_title(row), []).append(row)
    parts = []
    for title, group in tables.items():
        drawn = sorted({str(row["draws"]) for row in group if row["draws"]}, key=int)
        dates = sorted({row["date"] for row in group if row.get("date")})
        about = [f"{' or '.join(drawn)} draws"] if drawn else []
        lines = [
            f"### {title}",
            "",
            *([f"{', '.join([*about, *dates[-1:]])}.", ""] if about or dates else []),
            *([above] if above else []),
            _line(_HEADINGS),
            _line(["---"] * len(_HEADINGS)),
        ]
        lines += [_line(cells_of(row)) for row in group]
        notes = {f"`{row['setting']}`: {row['note']}" for row in group if row["note"] and row["verdict"] != "matches"}
        reasons = {f"`{row['setting']}` did not run{_reason(row)}" for row in group if row["verdict"] == DID_NOT_RUN}
        lines += ["", *(f"- {each}" for each in sorted(notes | reasons))]
        parts.append("\n".join(lines).rstrip())
    return "\n\n".join(parts)


def _reason(row: Mapping[str, Any]) -> str:
    """Why a row did not run. Greedy texts and draws decide about it. Results have the reasons of all parts."""
    parts = re.split(r"; (?=[a-z]+(?: \d+)?: )", str(row["reason"]))
    first = next((each for each in parts if each.startswith(("greedy: ", "draws "))), parts[0])
    first = re.sub(r"^(?:greedy|draws \d+): ", "", first)
    sampling = f" at {_sampling(row['sampling'])}" if row["greedy"] else ""
    return f"{sampling}: {first}"


def _title(row: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items() if name != "specdec-fast")
    return versions or str(row["engine"])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cells_of(row: Mapping[str, Any]) -> list[str]:
    """Returns the cells of a row: setting, sampling, distances, p-value, verdict, greedy texts, seeds, batch."""
    distance = "-" if row["distance"] is None else f"{row['distance']:.3f} ({row['limit']:.3f})"
    batch = row["sampled_batch"] or row["greedy_batch"]
    kind = "" if batch is None or row["sampled_batch"] else " greedy"
    return [
        f"`{row['setting']}`: {row['summary']}",
        _sampling(row["sampling"]),
        distance,
        "-" if row.get("first_at_most") is None else f"≤ {row['first_at_most']:.3f}",
        "-" if row["p_value"] is None else _p_value(row["p_value"]),
        f"**{row['verdict']}**" if row["verdict"] == "differs" else str(row["verdict"]),
        _share(row["greedy"]),
        _share(row["seeds"]),
        _share(batch) + kind,
    ]


def _sampling(sampling: Mapping[str, float]) -> str:
    words = [f"T {sampling['temperature']:g}"]
    words += [f"top-k {sampling['top_k']:g}"] if sampling["top_k"] else []
    words += [f"top-p {sampling['top_p']:g}"] if sampling["top_p"] < 1 else []
    return ", ".join(words)


def _p_value(value: float) -> str:
    return f"< {LEVEL:.0e}" if value < LEVEL else f"{value:.2g}"


def _share(found: Sequence[int] | None) -> str:
    return "-" if found is None else f"{found[0]}/{found[1]}"
