"""Arguments that several benchmarks take: which models, and which clock. Tests: tests/benchmarks/test_arguments.py."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from time import perf_counter, process_time

CLOCKS: dict[str, Callable[[], float]] = {"wall": perf_counter, "processor": process_time}


def add_models(parser: argparse.ArgumentParser) -> None:
    """Adds `--model NAME=PLACE`, whose values are pairs of a name for results and a place to load from."""
    parser.add_argument(
        "--model", action="append", required=True, type=_named_place, metavar="NAME=PLACE", help="may be repeated"
    )


def _named_place(text: str) -> tuple[str, str]:
    name, _, place = text.partition("=")
    if not name or not place:
        raise argparse.ArgumentTypeError(
            f"got {text!r}; expected NAME=PLACE, such as SmolLM2=HuggingFaceTB/SmolLM2-135M"
        )
    return name, place


def add_clock(parser: argparse.ArgumentParser) -> None:
    """Adds `--processor-time`. Read it with `clock_name`."""
    parser.add_argument(
        "--processor-time", action="store_true", help="processor time, for a machine with other work; 1 thread only"
    )


def clock_name(parser: argparse.ArgumentParser, asked: argparse.Namespace, threads: Sequence[int]) -> str:
    """Returns the key in `CLOCKS` of the clock that was asked for.

    Args:
        parser: Reports an error and ends the program.
        asked: The parsed arguments.
        threads: Numbers of threads that are measured. Processor time adds up over threads, so it says nothing about
            several.
    """
    if asked.processor_time and [*threads] != [1]:
        parser.error(f"--processor-time: got --threads {' '.join(map(str, threads))}; expected --threads 1")
    return "processor" if asked.processor_time else "wall"
