"""One HTML page of a GPU session, from whatever its parts left behind: python -m benchmarks.gpu.report FOLDER."""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Iterator, Sequence
from math import log10
from pathlib import Path
from typing import Any

STYLE = """<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">
<title>specdec-fast on a GPU</title><style>
body{font:14px/1.4 system-ui,sans-serif;margin:1.5em;color:#1a1a1a}h1{font-size:1.3em}h2{font-size:1.1em;margin-top:2em}
.wide{overflow-x:auto}table{border-collapse:collapse}td,th{padding:.2em .7em;text-align:left;vertical-align:top}
th{border-bottom:1px solid #999}td.n,th.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
tr:nth-child(even){background:#f4f4f4}.bad{color:#a00000;font-weight:600}
.bar{background:linear-gradient(#b9d2f0,#b9d2f0) no-repeat;min-width:7em}
svg{max-width:100%;height:auto;font:11px system-ui,sans-serif}pre{white-space:pre-wrap;margin:0}</style>
"""


def _cell(value: Any, numbers: bool) -> str:
    text = html.escape("" if value is None else str(value))
    if isinstance(value, Share):
        return f'<td class="n bar" style="background-size:{min(value.of, 1):.0%} 100%">{text}</td>'
    number = text.replace(",", "").replace(".", "").replace("%", "").replace(" ", "").replace("..", "")
    kind = (
        "n" if numbers and number.isdigit() else "bad" if text.startswith(("failed", "interrupted", "not run")) else ""
    )
    return f"<td{f' class={kind}' if kind else ''}>{text}</td>"


class Share:
    """A share of a limit, shown as a bar."""

    def __init__(self, of: float, cached: bool = False) -> None:
        self.of, self.cached = of, cached

    def __str__(self) -> str:
        return f"{self.of:.0%}{' (in cache)' if self.cached else ''}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]], numbers: bool = True) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    lines = "".join(f"<tr>{''.join(_cell(each, numbers) for each in row)}</tr>" for row in rows)
    return f"<div class=wide><table><tr>{head}</tr>{lines}</table></div>"


def _spread(row: dict[str, Any]) -> tuple[str, str]:
    if not row["microseconds"]:
        return "", ""
    return f"{row['microseconds']:,.1f}", f"{row['p10']:,.1f} .. {row['p90']:,.1f}"


def _session(folder: Path) -> Iterator[str]:
    if (folder / "machine.json").exists():
        found = json.loads((folder / "machine.json").read_text())
        yield "".join(f"<p class=bad>{html.escape(line)}</p>" for line in found.pop("remarks"))
        if "simulated" in str(found.get("device", "")):
            yield "<p class=bad>A rehearsal on a simulated GPU: times are those of the CPU and mean nothing.</p>"
        yield _table(("machine", ""), [(name, value) for name, value in found.items() if value is not None], False)
    if (folder / "cache.json").exists():
        found = json.loads((folder / "cache.json").read_text())
        yield (
            f"<p>Compiled kernels: {found['held_before']} were there, {found['added']} were loaded or compiled "
            f"beforehand, {found['compiled_later']} were compiled by the parts.</p>"
        )
    if (folder / "summary.tsv").exists():
        rows = [line.split("\t") for line in (folder / "summary.tsv").read_text().splitlines()]
        yield "<h2>Parts</h2>" + _table(("part", "result", "time"), rows)


def _tests(name: str, found: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} {outcome}" for outcome, count in found["counts"].items())
    wrong = [each for each in found["tests"] if each["outcome"] not in ("passed", "skipped")]
    lines = [(each["test"], each["outcome"], (each["message"].strip().splitlines() or [""])[-1]) for each in wrong]
    return f"<h2>Tests: {name}</h2><p>{counts or 'none'}</p>" + (
        _table(("test", "outcome", "why"), lines) if lines else ""
    )


def _sanitizer(name: str, found: dict[str, Any]) -> str:
    if "missing" in found:
        return f"<h2>{found['tool']}</h2><p>{html.escape(found['missing'])}</p>"
    rows = [
        (" ".join(run["ops"]), run["calls"], "did not end" if run["errors"] is None else run["errors"],
         "; ".join(f"{each['what']} {' '.join(each['where'][:1])}" for each in run["findings"]))
        for run in found["runs"]
    ]  # fmt: skip
    return f"<h2>{found['tool']}</h2>" + _table(("operators", "calls", "errors", "findings"), rows)


def _times(name: str, found: dict[str, Any]) -> str:
    rows = [
        (
            row["op"], row["backend"], row["sizes"], *_spread(row),
            f"{row['gigabytes_per_s']:,.0f}" if row["gigabytes_per_s"] else None,
            f"{row['teraflops_per_s']:,.1f}" if row["teraflops_per_s"] else None,
            Share(row["share"], row["cached"]) if row["share"] else None,
        )
        for row in found["times"] if row["microseconds"]
    ]  # fmt: skip
    missing = dict.fromkeys((row["op"], row["backend"], row["reason"]) for row in found["times"] if row["reason"])
    units = {"copy": " GB/s", "read": " GB/s", "multiply": " TFLOP/s"}
    facts = "; ".join(
        f"{key} {value:,.1f}{units[key]}" if key in units else f"{key} {value}"
        for key, value in found["machine"].items()
    )
    titles = ("operator", "backend", "shape", "median us", "p10 .. p90", "GB/s", "TFLOP/s", "of the limit")
    parts = f"<h2>Times: {name}</h2><p>{html.escape(facts)}</p>" + _table(titles, rows)
    if missing:
        parts += (
            "<details><summary>Not timed</summary>"
            + _table(("operator", "backend", "why"), list(missing))
            + "</details>"
        )
    return parts + (roofline(found) if name == "kernels" else "")


def roofline(found: dict[str, Any]) -> str:
    """A figure of the calls that multiply: TFLOP/s over operations per byte, under the ceilings of the same run."""
    machine = found["machine"]
    memory, most = max(machine["copy"], machine["read"]) / 1e3, machine["multiply"]  # TB/s, TFLOP/s
    points = [
        (2 * row["products"] / row["bytes"], row["teraflops_per_s"], f"{row['op']} ({row['backend']}) {row['sizes']}")
        for row in found["times"] if row["microseconds"] and row["products"]
    ]  # fmt: skip
    if not points:
        return ""
    wide, high, left = 640, 300, 50
    least, largest = (
        log10(min(each[0] for each in points) / 2),
        log10(max(max(each[0] for each in points), most / memory) * 2),
    )
    bottom, top = log10(min(each[1] for each in points) / 2), log10(max(most, *(each[1] for each in points)) * 2)

    def at(intensity: float, speed: float) -> tuple[float, float]:
        across = (log10(intensity) - least) / (largest - least)
        return left + across * (wide - left - 10), (high - 30) * (1 - (log10(speed) - bottom) / (top - bottom)) + 5

    corners = [at(10**least, max(10**least * memory, 10**bottom)), at(most / memory, most), at(10**largest, most)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#1f5fae"><title>{html.escape(words)}</title></circle>'
        for (x, y), words in ((at(intensity, speed), words) for intensity, speed, words in points)
    )
    return (
        f'<h2>Roofline</h2><svg viewBox="0 0 {wide} {high}" width="{wide}" role="img" aria-label="roofline">'
        f'<polyline points="{line}" fill="none" stroke="#888"/>{dots}'
        f'<text x="{wide - 12}" y="{corners[-1][1] - 6:.0f}" text-anchor="end">{most:,.0f} TFLOP/s</text>'
        f'<text x="{left}" y="{high - 6}">operations per byte, from {10**least:.2g} to {10**largest:.2g}; '
        f"TFLOP/s, from {10**bottom:.2g} to {10**top:.2g}; both logarithmic</text></svg>"
    )


def _counters(name: str, found: dict[str, Any]) -> str:
    if "missing" in found:
        return f"<h2>ncu</h2><p>{html.escape(found['missing'])}</p>"
    rows = [
        (
            each["op"],
            kernel.get("kernel", each.get("reason")),
            kernel.get("grid"),
            *(kernel.get(m) for m in found["metrics"]),
        )
        for each in found["operators"]
        for kernel in each["kernels"] or [{}]
    ]
    return "<h2>ncu</h2>" + _table(("operator", "kernel", "grid", *found["metrics"]), rows)


def _steps(name: str, found: dict[str, Any]) -> str:
    names = ("shape", "drafter", "rows", "drafted", "acceptance", "asked", "mode")
    times = ("step_us", "target_us", "draft_us", "overhead_us")
    rows = []
    for each in found["steps"]:
        start = [each.get(word) for word in names]
        if "error" in each:
            rows.append((*start, *[None] * 9, f"failed: {each['error'].splitlines()[0]}"))
            continue
        trace = each["trace"] or {}
        traced = [f"{trace[key]:,.0f}" if trace else None for key in ("kernels", "busy_us", "gap_us")]
        between = f"{each['step_p10_us']:,.0f} .. {each['step_p90_us']:,.0f}"
        tokens = f"{each['tokens_per_step']:.2f}"
        first, *rest = (f"{each[key]:,.0f}" for key in times)
        why = each["explain"] if each["asked"] != each["mode"] else None
        rows.append((*start, first, between, *rest, *traced, tokens, why))
    titles = (
        "step us",
        "p10 .. p90",
        "target us",
        "draft us",
        "beyond both us",
        "kernels",
        "busy us",
        "gaps us",
        "tokens",
        "why",
    )
    longest = [
        (*(line.get(word) for word in names[:5]), each["name"][:100], f"{each['count']:.1f}", f"{each['us']:,.1f}")
        for line in found["steps"]
        for each in (line.get("trace") or {}).get("longest", ())
    ]
    more = _table((*names[:5], "kernel", "per step", "us per step"), longest)
    return (
        f"<h2>Steps: {name}</h2><p>{html.escape(found['device'])}</p>{_table((*names, *titles), rows)}"
        f"{f'<details><summary>Kernels that take longest</summary>{more}</details>' if longest else ''}"
    )


def _draws(name: str, found: dict[str, Any]) -> str:
    rows = [(row["rule"], row["drafts"], row["seconds"], f"{row['lowest_p']:.2g}") for row in found["rows"]]
    return f"<h2>Draws against distributions</h2><p>{found['draws']:,} draws</p>" + _table(
        ("rule", "drafts", "s", "lowest p"), rows
    )


SECTIONS = (
    ("tests.json", _tests), ("operators.json", _tests), ("sanitize-*.json", _sanitizer), ("lab_draws.json", _draws),
    ("kernels.json", _times), ("peers.json", _times), ("ncu.json", _counters), ("step*.json", _steps),
)  # fmt: skip


def page(folder: Path) -> str:
    """Parts that were not run are left out, those that were cut short are shown as far as they came."""
    parts = [STYLE, "<h1>A GPU session of specdec-fast</h1>", *_session(folder)]
    for pattern, section in SECTIONS:
        for file in sorted(folder.glob(pattern)):
            try:
                parts.append(section(file.stem, json.loads(file.read_text())))
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                parts.append(f"<p class=bad>{html.escape(f'{file.name} cannot be shown: {error}')}</p>")
    return "\n".join(parts)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    (place / "report.html").write_text(page(place))
