"""`specdec kernels list | explain | check | inspect | bench`: operators, their backends and their speed.

Tests: tests/commands/test_kernels.py.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from specdec_fast.commands import options
from specdec_fast.commands.json_output import print_json
from specdec_fast.commands.kernel_arguments import operator_names, parse_sizes, select_device

app = typer.Typer(help="List, check, inspect and time operators and their backends.", no_args_is_help=True)

Ops = Annotated[list[str] | None, typer.Argument(help="Operators (default: all).", show_default=False)]
Device = Annotated[
    str | None, typer.Option("--device", help="Device: cpu, cuda or cuda:N (default: a GPU if available).")
]


@app.callback()
def main() -> None:
    """Operators and their kernels."""


def _show(
    titles: Sequence[str],
    rows: Iterable[Sequence[Any]],
    right: Sequence[int] = (),
    least: Sequence[int] = (),
    whole: bool = False,
) -> None:
    """Prints rows as a table; a first entry that repeats the one above is left blank.

    Args:
        titles: Column titles.
        rows: Entries by column; None is blank.
        right: Columns that are aligned to the right.
        least: Minimum widths by column; 0 for none.
        whole: Folds no entry, however wide the table becomes.
    """
    from rich import box
    from rich.table import Table

    from specdec_fast.commands.terminal_output import make_console, print_table

    given = [[str("" if each is None else each) for each in row] for row in rows]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for at, title in enumerate(titles):
        wide = least[at] if at < len(least) else None
        table.add_column(title, justify="right" if at in right else "left", overflow="fold", min_width=wide)
    last = None
    for row in given:
        table.add_row("" if row[0] == last else row[0], *row[1:])
        last = row[0]
    console = make_console()
    if whole:
        console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
    print_table(console, table)


@app.command("list")
def list_operators(as_json: options.Json = False) -> None:
    """List every operator with its backends: selected, available, or the reason why not."""
    from specdec_kernels import OPS

    rows = [row for op in OPS.values() for row in op.explain()]
    if as_json:
        print_json([row._asdict() for row in rows])
        return
    from specdec_fast.commands.info import print_operators

    print_operators([row._asdict() for row in rows])


def _verdict(row: Any) -> str:
    return "selected" if row.chosen else "available" if row.reason is None else f"no: {row.reason}"


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="Name of the operator.")],
    shape: Annotated[
        list[str] | None, typer.Argument(help="Sizes as NAME=VALUE, such as nodes=8 dtype=bfloat16.")
    ] = None,
    device: Device = None,
    as_json: options.Json = False,
) -> None:
    """Show which backend serves a call of these sizes, and why the others do not."""
    from specdec_kernels import OPS
    from specdec_kernels.inspection.timing import describe
    from specdec_kernels.testing.agreement import make_sample

    (op,) = operator_names([op])
    sizes = parse_sizes(op, shape or ())
    where = select_device(device)
    try:
        call = make_sample(op, sizes, where)
    except (ValueError, RuntimeError, MemoryError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"kernels: no call of {op} with {describe(op, sizes)} can be made: {first}") from error
    rows = OPS[op].explain(*call.arguments, **call.options)
    if as_json:
        print_json({"sizes": describe(op, sizes), "backends": [row._asdict() for row in rows]})
        return
    print(describe(op, sizes))
    _show(("operator", "backend", "this call"), [(row.op, row.backend, _verdict(row)) for row in rows])


@app.command()
def check(ops: Ops = None, device: Device = None, as_json: options.Json = False) -> None:
    """Run every available backend on sample calls and compare it with the reference.

    The exit status is 1 if a backend differs.
    """
    from specdec_fast.commands.terminal_output import counted
    from specdec_kernels.testing.agreement import check as compare

    rows = list(compare(operator_names(ops), device=select_device(device)))
    ran, wrong = [row for row in rows if row.ran], [row for row in rows if not row.agrees]
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        if ran:
            _show(("operator", "backend", "dtype", "calls", "against the reference"), _agreements(ran), right=(3,))
        if len(ran) < len(rows):
            _show(("backend", "reason for not running", "operators"), _left_out(rows))
        alone = dict.fromkeys(row.op for row in rows if row.op not in {each.op for each in ran})
        if alone:
            print(f"only the reference is available: {', '.join(alone)}")
        for row in wrong:
            print(f"{row.op} ({row.backend}, {row.dtype}{row.case and f', {row.case}'}): {row.reason}")
        print(f"{counted(len(ran), 'run')}, {len(wrong)} of them differ")
    if wrong:
        raise typer.Exit(1)


def _agreements(rows: Sequence[Any]) -> Iterable[tuple[Any, ...]]:
    """Yields a line per operator, backend and dtype: the number of calls, and whether they agree."""
    for key in dict.fromkeys((row.op, row.backend, row.dtype) for row in rows):
        own = [row for row in rows if (row.op, row.backend, row.dtype) == key]
        wrong = sum(not row.agrees for row in own)
        worst = max(row.worst for row in own)
        yield *key, len(own), f"{wrong} differ, see below" if wrong else f"agrees (within {worst:.1g})"


def _left_out(rows: Sequence[Any]) -> Iterable[tuple[str, str, str]]:
    """Yields every reason once, with its calls."""
    reasons = dict.fromkeys((row.backend, row.reason) for row in rows if not row.ran)
    for backend, reason in sorted(reasons, key=lambda each: each[0]):
        having = dict.fromkeys(row.op for row in rows if row.backend == backend)
        left: dict[str, dict[str, None]] = {}
        for row in rows:
            if not row.ran and (row.backend, row.reason) == (backend, reason):
                left.setdefault(row.op, {})[row.case] = None
        whole = {op for op in left if all(r.case in left[op] for r in rows if (r.op, r.backend) == (op, backend))}
        if len(whole) == len(having):
            yield backend, reason, f"all {len(having)} that have it" if len(having) > 1 else next(iter(having))
        else:
            words = [op if op in whole else f"{op} ({', '.join(c or 'plain' for c in left[op])})" for op in left]
            yield backend, reason, ", ".join(words)


@app.command()
def inspect(
    ops: Ops = None,
    arch: Annotated[
        list[str] | None, typer.Option("--arch", help="GPU architecture: sm_80, sm_90 or sm_100; may be repeated.")
    ] = None,
    everyday: Annotated[
        bool, typer.Option("--everyday", help="Compile only the kernels that every test run compiles.")
    ] = False,
    record: Annotated[bool, typer.Option("--record", help="Record the results as the new ceilings.")] = False,
    as_json: options.Json = False,
) -> None:
    """Compile Triton kernels without a GPU and show registers, spills and shared memory.

    The exit status is 1 if a kernel exceeds its recorded ceiling or has none. Needs the
    extra `gpu`.
    """
    from specdec_kernels.inspection import machine_code
    from specdec_kernels.triton_shared.aot_config import ARCHITECTURES
    from specdec_kernels.unknown_names import unknown_name

    reason = machine_code.unavailable_reason()
    if reason is not None:
        raise ValueError(f"kernels: Triton kernels cannot be compiled here: {reason}")
    wanted = arch or list(ARCHITECTURES if record else ("sm_90",))
    for each in wanted:
        if each not in ARCHITECTURES:
            raise ValueError(unknown_name("--arch", each, ARCHITECTURES))
    of = set(operator_names(ops))
    selected = [v for v in machine_code.variants() if v.name.partition("/")[0] in of and (v.everyday or not everyday)]
    if not selected:
        names = ", ".join(sorted(of))
        raise ValueError(f"kernels: got {names}, without a Triton kernel; expected an operator with one")
    recorded = machine_code.ceilings()
    found = {}
    for variant in _progress(selected, "" if everyday else "; --everyday takes fewer"):
        served = [each for each in wanted if each in variant.architectures]
        found[variant.name] = {each: machine_code.measure(variant, each) for each in served}
    if record:
        machine_code.record(found)
        recorded = machine_code.ceilings()
    problems = {
        (name, each): machine_code.breaches(cost, recorded.get(name, {}).get(each), each)
        for name, costs in found.items()
        for each, cost in costs.items()
    }
    if as_json:
        print_json(
            [
                {"kernel": name, "arch": each, **asdict(cost), "problems": problems[name, each]}
                for name, costs in found.items()
                for each, cost in costs.items()
            ]
        )
    else:
        titles = ("kernel", "arch", "registers", "stack", "spills", "shared", "matrix", "loads 16 B / less")
        _show(
            titles,
            [
                (name, each, c.registers, c.stack, c.spills, f"{c.shared:,}", _matrix(c, each),
                 f"{c.wide_loads} / {c.narrow_loads}")
                for name, costs in found.items()
                for each, c in costs.items()
            ],
            right=(2, 3, 4, 5),
            whole=True,
        )  # fmt: skip
        for (name, each), words in problems.items():
            if words:
                print(f"{name}, {each}: {'; '.join(words)}")
        unknown = {(name, each) for name, each in problems if each not in recorded.get(name, {})}
        print(_verdicts(problems, unknown, machine_code.version()))
    if any(problems.values()):
        raise typer.Exit(1)


def _verdicts(
    problems: Mapping[tuple[str, str], Sequence[str]], unknown: Container[tuple[str, str]], triton: str
) -> str:
    """Returns the last line: how many kernels exceed their ceilings, and how many have none."""
    differ = sum(bool(words) for key, words in problems.items() if key not in unknown)
    without = sum(key in unknown for key in problems)
    known = f"{differ or 'none'} of those recorded differ{'' if differ > 1 else 's'}"
    more = f"; for {without} nothing is recorded" if without else ""
    from specdec_fast.commands.terminal_output import counted

    return f"{counted(len(problems), 'kernel')} with Triton {triton}: {known}{more}"


def _matrix(cost: Any, architecture: str) -> str:
    """Returns kind and number of matrix instructions."""
    if cost.wgmma:
        return f"{cost.wgmma} {'tcgen05' if architecture == 'sm_100' else 'wgmma'}"
    return f"{cost.mma} mma" if cost.mma else "none"


def _progress(items: Sequence[Any], advice: str = "") -> Iterable[Any]:
    """Yields the items, with a progress bar on a terminal."""
    from rich.progress import track

    from specdec_fast.commands.terminal_output import make_console

    console = make_console(stderr=True)
    if not console.is_terminal and len(items) > 20:
        print(f"specdec: note: compiling {len(items)} kernels takes minutes{advice}", file=sys.stderr)
    return track(items, "compiling", console=console, transient=True, disable=not console.is_terminal)


@app.command()
def bench(
    ops: Ops = None,
    shape: Annotated[
        list[str] | None, typer.Option("--size", "-s", help="Size as NAME=VALUE, for one operator; may be repeated.")
    ] = None,
    device: Device = None,
    rounds: Annotated[int, typer.Option(help="Number of timed rounds per backend.")] = 50,
    peers: Annotated[
        str | None,
        typer.Option(help="Module of peer libraries to time too: benchmarks.kernels.gpu of the repository."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Time every backend, next to the device's copy, read and multiply rates in the same run."""
    from specdec_kernels.inspection import timing

    names = operator_names(ops)
    if shape and len(names) != 1:
        raise ValueError("kernels: --size: got no single operator; expected one; name it")
    if rounds < 1:
        raise ValueError(f"kernels: got {rounds} rounds; expected at least 1")
    where = select_device(device)
    sizes = parse_sizes(names[0], shape) if shape else None
    others = timing.find_peers(peers) if peers else None
    limit = timing.measure_ceilings(where)
    rows = list(timing.bench(names, where, sizes, rounds, limit, others))
    if as_json:
        print_json({"device": str(where), "ceilings": asdict(limit), "times": [asdict(row) for row in rows]})
        return
    print(f"{where}: copy {limit.copy:,.1f} GB/s, read {limit.read:,.1f} GB/s, product {limit.multiply:,.2f} TFLOP/s")
    for op, words in dict.fromkeys((row.op, row.sizes) for row in rows):
        print(f"\n{op}: {words}")
        own = [row for row in rows if (row.op, row.sizes) == (op, words)]
        titles = ("backend", "us", "GB/s", "TFLOP/s", "of the limit")
        _show(titles, [_timed(row) for row in own if row.reason is None], (1, 2, 3, 4), (9, 12, 8, 8, 12))
        for row in own:
            if row.reason is not None:
                print(f"{row.backend}: not timed: {row.reason}")


def _timed(row: Any) -> tuple[Any, ...]:
    product = None if row.teraflops_per_s is None else f"{row.teraflops_per_s:,.2f}"
    share = None if row.share is None else f"{row.share:.0%}{' (in cache)' if row.cached else ''}"
    rate = None if row.gigabytes_per_s is None else f"{row.gigabytes_per_s:,.1f}"
    return row.backend, f"{row.microseconds:,.1f}", rate, product, share
