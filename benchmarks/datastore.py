"""Time of a look-up of drafter `rest` by size of its datastore, with the file in memory.

`python -m benchmarks.datastore` builds the datastores one after another, prints a table, and writes a result file (in
benchmarks/results) after every size. The text has Zipf's frequencies over 32,000 tokens, and half of it is copied from
elsewhere in its document. Contexts are sixteen tokens of it with one token replaced, so that matches of all lengths
occur.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.harness.interleave import environment
from specdec_fast import SamplingParams, get_drafter
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Budget
from specdec_fast.retrieval.datastore import Datastore, build

RESULTS = Path(__file__).parent / "results"
VOCAB, DOCUMENT = 32_000, 10**6


def document(seed: int, length: int = DOCUMENT) -> np.ndarray[Any, Any]:
    """Returns a random document, int64 [length]."""
    source = np.random.default_rng(seed)
    weights = 1 / np.arange(1, VOCAB + 1)
    text = source.choice(VOCAB, length, p=weights / weights.sum())
    starts = np.sort(source.integers(64, length - 64, length // 80))
    origins = (source.random(len(starts)) * (starts - 40)).astype(np.int64)
    for start, origin, size in zip(starts.tolist(), origins.tolist(), source.integers(4, 76, len(starts)).tolist()):
        text[start : start + size] = text[origin : origin + size][: length - start]
    return text


def contexts(stream: Any, count: int) -> Iterator[list[int]]:
    """Yields sixteen tokens from random places, with one of the first thirteen replaced."""
    source = np.random.default_rng(0)
    for place in source.integers(0, len(stream) - 16, count):
        found = stream[place : place + 16].astype(np.int64).tolist()
        found[int(source.integers(0, 13))] = int(source.integers(0, VOCAB))
        yield [min(token, VOCAB - 1) for token in found]


def measure(size: int, folder: Path, queries: int) -> dict[str, Any]:
    """Builds a datastore of `size` tokens, and times proposals of 64 nodes for one row in microseconds."""
    start = time.perf_counter()
    build(folder / "store", (document(seed, min(size, DOCUMENT)) for seed in range(max(size // DOCUMENT, 1))), VOCAB)
    built = time.perf_counter() - start
    store = Datastore(folder / "store")
    store.verify()  # reads the whole file into memory
    drafter, state = get_drafter("rest")(datastore=store), DecodeState(1, 64)
    spent, nodes = [], 0
    for context in contexts(store._arrays["tokens"], queries):
        row = state.join(context, SamplingParams(seed=1), len(context), ())
        rng = state.rng([row])
        with torch.inference_mode():
            start = time.perf_counter()
            draft = drafter.propose(state, [row], Budget([64]), rng)
            spent.append(1e6 * (time.perf_counter() - start))
        nodes += draft.num_nodes - 1
        state.leave(row)
    spent.sort()
    row_of = {"tokens": size, "bytes": store.num_bytes, "build_s": round(built, 1), "nodes": nodes / queries}
    at = {"median_us": median(spent), "p99_us": spent[int(0.99 * queries)]}
    (folder / "store").unlink()
    return row_of | {name: round(value, 1) for name, value in at.items()}


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    lines = ["| tokens | file, MB | median, us | 99 of 100 below, us | nodes |", "|" + "---|" * 5]
    for row in rows:
        lines.append(
            f"| {row['tokens']:.0e} | {row['bytes'] / 1e6:.0f} | {row['median_us']:.0f} | {row['p99_us']:.0f} | "
            f"{row['nodes']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e5, 1e6, 1e7, 1e8])
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--folder", type=Path, help="where the datastores are built (default: the system's)")
    parser.add_argument("--out", type=Path, default=RESULTS / "datastore_cpu.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts, rows = environment(), []
    for size in options.sizes:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            rows.append(measure(int(size), Path(folder), options.queries))
        options.out.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1) + "\n")
        print(rows[-1], flush=True)
    options.out.with_suffix(".md").write_text(as_markdown(rows) + "\n")
    print(as_markdown(rows))


if __name__ == "__main__":
    main()
