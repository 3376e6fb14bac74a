"""Measured numbers: a table of them follows `<!-- results: benchmarks/results/x.json -->`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path


def numbers_in(value: object) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers_in(each)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)


def unsupported_numbers(root: Path, document: Path) -> list[str]:
    """Decimal numbers of tables that no recorded result supports."""
    found = []
    source: str | None = None
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        marker = re.fullmatch(r"<!-- results: (\S+) -->", line.strip())
        if marker:
            source = marker[1]
        elif line.lstrip().startswith("|"):
            printed = re.findall(r"(?<![\w.])(?<![A-Za-z]-)\d[\d,]*\.\d+(?![\w.])", re.sub(r"`[^`]*`", "", line))
            if printed and source is None:
                found.append(
                    f"{document.relative_to(root)}:{number}: {printed[0]} has no results marker above its table"
                )
            elif printed and not (root / source).exists():  # type: ignore[operator]
                found.append(f"{document.relative_to(root)}:{number}: {source} does not exist")
            elif printed:
                recorded = list(numbers_in(json.loads((root / source).read_text(encoding="utf-8"))))  # type: ignore[operator]
                for text in printed:
                    digits = len(text.partition(".")[2])
                    if not any(f"{value:.{digits}f}" == text.replace(",", "") for value in recorded):
                        found.append(f"{document.relative_to(root)}:{number}: {text} is not in {source}")
        elif line.strip():
            source = None
    return found
