"""`specdec datastore build | info`: datastores for drafter `rest`, from text, JSONL or Parquet files."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec_fast.commands import options
from specdec_fast.retrieval.documents import find_files, read_documents

app = typer.Typer(help="Build and inspect datastores for the drafter `rest`.", no_args_is_help=True)
_BATCH = 64  # documents that are tokenized together


@app.command()
def build(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help="Files or folders. Documents of .jsonl and .parquet files come from --field; other files "
            "are one document each."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    model: options.Model = "demo-target",
    field: Annotated[
        str, typer.Option(help="Field of a JSONL object, or column of a Parquet file, that holds the text.")
    ] = "text",
    as_json: options.Json = False,
) -> None:
    """Build a datastore from documents, for the target's tokenizer."""
    from specdec_fast.commands.open_engine import note_hub, quiet
    from specdec_fast.commands.terminal_output import counted
    from specdec_fast.loading import load_tokenizer
    from specdec_fast.retrieval.datastore import Datastore
    from specdec_fast.retrieval.datastore import build as write
    from specdec_fast.retrieval.tokenizer_fingerprint import fingerprint, vocabulary_size

    quiet()
    files = find_files(inputs)
    note_hub(model)
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise ValueError(f"--model: got {model!r}; expected a model with a tokenizer")
    started = time.monotonic()
    try:
        with _Progress(sum(file.stat().st_size for file in files)) as progress:
            documents = _tokenized(read_documents(files, field, progress.advance), tokenizer)
            write(output, documents, vocabulary_size(tokenizer), fingerprint(tokenizer), progress)
    except KeyboardInterrupt:
        print(f"specdec: interrupted; nothing was written to {output}", file=sys.stderr)
        raise typer.Exit(130) from None
    made = Datastore(output)
    seconds = time.monotonic() - started
    if as_json:
        print(json.dumps({**describe(made), "seconds": seconds}))
    else:
        print(
            f"{output}: {counted(made.num_documents, 'document')}, {counted(made.num_tokens, 'token')}, "
            f"{made.num_bytes / 1e6:,.1f} MB, {seconds:.1f} s"
        )


@app.command()
def info(
    path: Annotated[Path, typer.Argument(help="Datastore file.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read the whole file and compare its checksums.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show the contents of a datastore and check that it is intact."""
    from specdec_fast.retrieval.datastore import Datastore

    found = Datastore(path)
    if verify:
        with _Progress(found.num_bytes) as progress:
            found.verify(progress.advance)
    if as_json:
        print(json.dumps({**describe(found), "verified": verify}))
        return
    from rich.table import Table

    from specdec_fast.commands.terminal_output import make_console

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in describe(found).items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    table.add_row("checksums", "right" if verify else "not checked (--verify)")
    make_console().print(table)


def describe(store: Any) -> dict[str, Any]:
    """Returns the datastore's properties as JSON values."""
    return {
        "path": str(store.path),
        "documents": store.num_documents,
        "tokens": store.num_tokens,
        "vocab_size": store.vocab_size,
        "vocabulary": store.header["vocabulary"],
        "bytes": store.num_bytes,
    }


class _Progress:
    """A progress bar over bytes on a terminal, and nothing in a pipe."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("reading", total=max(total, 1), note="")

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, count: int) -> None:
        self._bar.update(self._task, advance=count)

    def __call__(self, stage: str, tokens: int) -> None:
        self._bar.update(self._task, description=stage, note=f"{tokens:,} tokens")


def _tokenized(texts: Iterator[str], tokenizer: Any) -> Iterator[list[int]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _BATCH:
            yield from tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
            batch = []
    if batch:
        yield from tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
