"""Reading documents: text files, fields of JSONL lines, columns of Parquet files.

Tests: tests/commands/test_datastore.py, tests/train/heads/test_training_texts.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from specdec_fast.extras import require

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".parquet")
Advance = Callable[[int], None]


def find_files(inputs: Sequence[Path]) -> list[Path]:
    """Finds text files.

    Args:
        inputs: Files of any kind, and folders, which are searched for files that end in `SUFFIXES`.

    Returns:
        The files, those of a folder in alphabetical order.

    Raises:
        ValueError: If an input does not exist, if a folder holds no such file, or if pyarrow is missing for Parquet.
    """
    found: list[Path] = []
    for each in inputs:
        if each.is_dir():
            inside = sorted(file for file in each.rglob("*") if file.is_file() and file.suffix in SUFFIXES)
            if not inside:
                raise ValueError(f"{each}: no file in it ends in {', '.join(SUFFIXES)}; name the files one by one")
            found += inside
        elif each.is_file():
            found.append(each)
        else:
            raise ValueError(f"{each}: expected a file or a folder")
    for file in found:
        if file.suffix == ".parquet":
            require("datastore", str(file))
    return found


def read_documents(files: Sequence[Path], field: str = "text", advance: Advance = lambda size: None) -> Iterator[str]:
    """Reads the texts in files, in order.

    Args:
        files: JSON lines, Parquet, or plain text, which is one document a file.
        field: Name of the text in JSON lines and Parquet.
        advance: Called with the number of bytes that were read.

    Yields:
        One text per document.
    """
    for file in files:
        if file.suffix == ".jsonl":
            yield from _lines(file, field, advance)
        elif file.suffix == ".parquet":
            yield from _column(file, field)
            advance(file.stat().st_size)
        else:
            yield file.read_text(encoding="utf-8", errors="replace")
            advance(file.stat().st_size)


def _lines(file: Path, field: str, advance: Advance) -> Iterator[str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    text = json.loads(line)[field]
                except (ValueError, KeyError, TypeError):
                    text = None
                if not isinstance(text, str):
                    raise ValueError(f"{file}:{number}: expected a JSON object with text in {field!r}; see --field")
                # halves of surrogate pairs are replaced, as bytes that are not UTF-8 are in text files
                yield text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            advance(len(line))


def _column(file: Path, field: str) -> Iterator[str]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(file)
    except ArrowInvalid as error:
        raise ValueError(f"{file}: this is no Parquet file: {error}") from None
    if field not in table.schema_arrow.names:
        raise ValueError(f"{file}: got columns {', '.join(table.schema_arrow.names)}; expected {field!r}; see --field")
    for batch in table.iter_batches(columns=[field]):
        yield from (str(text) for text in batch.column(0).to_pylist() if text is not None)
