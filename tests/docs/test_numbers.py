"""Numbers in tables of documents are those of recorded results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from documents import listing
from documents.numbers import unsupported_numbers

Write = Callable[[dict[str, str]], list[Path]]
EXCEPT = {"CHANGELOG.md", "decisions"}
"""Documents that quote numbers of their day."""


def test_measured_numbers_are_recorded(root: Path, documents: list[Path]) -> None:
    measured = [path for path in documents if not EXCEPT & {path.name, path.parent.name}]
    found = [each for path in measured for each in unsupported_numbers(root, path)]
    assert not found, listing(found)
    assert "<!-- results: " in (root / "README.md").read_text(encoding="utf-8"), "its tables are not found"


def test_a_planted_number_is_caught(tmp_path: Path, write: Write) -> None:
    text = (
        "| a |\n| --- |\n| 9.99 ms |\n\ntext\n\n<!-- results: r.json -->\n| b |\n| 1.23 |\n"
        "| 1.24 ms, `0.1.0`, 2.13.0, GLM-4.5 |\n\ntext\n<!-- results: gone.json -->\n| 3.5 |\n"
    )
    document, _ = write({"README.md": text, "r.json": json.dumps({"rows": [{"seconds": 1.2312}]})})
    assert unsupported_numbers(tmp_path, document) == [
        "README.md:3: 9.99 has no results marker above its table",
        "README.md:10: 1.24 is not in r.json",
        "README.md:14: gone.json does not exist",
    ]
