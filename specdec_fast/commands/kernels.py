"""`specdec kernels list | explain | check | inspect | bench`: the operators, their backends and what they cost.

Tests: tests/cli/test_kernels.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from specdec_fast.commands import options

app = typer.Typer(
    help="Operators and their kernels: who serves, do they agree, what do they cost.", no_args_is_help=True
)

Ops = Annotated[list[str] | None, typer.Argument(help="Operators; all by default.", show_default=False)]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:N; by default a GPU if there is one.")]


@app.callback()
def main() -> None:
    """Operators and their kernels."""


def _names(wanted: Sequence[str] | None) -> list[str]:
    """The operators asked for. Raises: ValueError for one that does not exist."""
    from specdec_kernels import OPS

    for name in wanted or ():
        if name not in OPS:
            raise ValueError(f"kernels: got operator {name!r}; expected one of {', '.join(OPS)}")
    return list(wanted or OPS)


def _device(name: str | None) -> Any:
    import torch

    from specdec_fast.loading import check_device

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    check_device(name, "--device")
    return torch.device(name)


def _sizes(op: str, words: Sequence[str]) -> Any:
    """Sizes from "name=value" words. Raises: ValueError for a size that the operator does not know."""
    import torch

    from specdec_kernels.agreement import SAMPLES
    from specdec_kernels.samples import Sizes

    known = SAMPLES[op].names
    chosen: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            raise ValueError(f"kernels: got {word!r}; expected NAME=VALUE with a name of {op}: {', '.join(known)}")
        if name == "dtype":
            chosen[name] = getattr(torch, value, None)
            if not isinstance(chosen[name], torch.dtype):
                raise ValueError(f"kernels: got dtype {value!r}; expected float32, bfloat16, float16 or float64")
        elif not value.isdigit() or (int(value) < 1 and name != "length"):
            raise ValueError(f"kernels: got {word!r}; expected a whole number of at least 1")
        else:
            chosen[name] = int(value)
    return Sizes(**chosen)


def _show(titles: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[int] = ()) -> None:
    """Rows as a table; a row whose first entry repeats the one above leaves it out."""
    from rich import box
    from rich.table import Table

    from specdec_fast.commands.show import make_console

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for at, title in enumerate(titles):
        table.add_column(title, justify="right" if at in right else "left", overflow="fold")
    last = None
    for row in rows:
        table.add_row("" if row[0] == last else str(row[0]), *("" if each is None else str(each) for each in row[1:]))
        last = row[0]
    make_console().print(table)


def _as_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


@app.command("list")
def list_operators(as_json: options.Json = False) -> None:
    """Every operator with its backends: chosen here, ready, or why not."""
    from specdec_kernels import OPS

    rows = [row for op in OPS.values() for row in op.explain()]
    if as_json:
        _as_json([row._asdict() for row in rows])
        return
    from specdec_fast.commands.info import print_operators

    print_operators([row._asdict() for row in rows])


def _verdict(row: Any) -> str:
    return "chosen" if row.chosen else "ready" if row.reason is None else f"no: {row.reason}"


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="Operator.")],
    shape: Annotated[list[str] | None, typer.Argument(help="NAME=VALUE, such as nodes=8 dtype=bfloat16.")] = None,
    device: Device = None,
    as_json: options.Json = False,
) -> None:
    """Which backend serves a call of this shape, and why the others do not."""
    from specdec_kernels import OPS
    from specdec_kernels.agreement import sample
    from specdec_kernels.timing import describe

    (op,) = _names([op])
    sizes = _sizes(op, shape or ())
    call = sample(op, sizes, _device(device))
    rows = OPS[op].explain(*call.arguments, **call.options)
    if as_json:
        _as_json({"sizes": describe(op, sizes), "backends": [row._asdict() for row in rows]})
        return
    print(describe(op, sizes))
    _show(("operator", "backend", "this call"), [(row.op, row.backend, _verdict(row)) for row in rows])


@app.command()
def check(ops: Ops = None, device: Device = None, as_json: options.Json = False) -> None:
    """Run every backend that is here on sample calls and compare with the reference. Exit status 1 if one differs."""
    from specdec_fast.commands.show import counted
    from specdec_kernels.agreement import check as compare

    rows = list(compare(_names(ops), device=_device(device)))
    if as_json:
        _as_json([asdict(row) for row in rows])
    else:
        words = [f"agrees (within {r.worst:.1g})" if r.ran and r.agrees else r.reason for r in rows]
        lines = [(r.op, r.backend, r.dtype, w if r.ran else f"not run: {w}") for r, w in zip(rows, words, strict=True)]
        _show(("operator", "backend", "dtype", "against the reference"), lines)
        print(f"{counted(sum(r.ran for r in rows), 'run')}, {sum(not r.agrees for r in rows)} of them differ")
    if not all(row.agrees for row in rows):
        raise typer.Exit(1)


@app.command()
def inspect(
    ops: Ops = None,
    arch: Annotated[list[str] | None, typer.Option("--arch", help="sm_80, sm_90, sm_100; may be repeated.")] = None,
    everyday: Annotated[bool, typer.Option("--everyday", help="Only what every test run compiles.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Write the results down as new ceilings.")] = False,
    as_json: options.Json = False,
) -> None:
    """Compile Triton kernels, without a GPU, and show what they cost. Exit status 1 if a ceiling is exceeded.

    Needs the extra `gpu`.
    """
    from specdec_kernels import machine_code

    reason = machine_code.missing()
    if reason is not None:
        raise ValueError(f"kernels: nothing can be compiled here: {reason}")
    wanted = arch or list(machine_code.ARCHITECTURES if record else ("sm_90",))
    for each in wanted:
        if each not in machine_code.ARCHITECTURES:
            raise ValueError(f"kernels: got {each!r}; expected one of {', '.join(machine_code.ARCHITECTURES)}")
    of = set(_names(ops))
    chosen = [v for v in machine_code.variants() if v.name.partition("/")[0] in of and (v.everyday or not everyday)]
    if not chosen:
        names = ", ".join(sorted(of))
        raise ValueError(f"kernels: got {names}, without a Triton kernel; expected an operator that has some")
    recorded = machine_code.ceilings()
    found = {}
    for variant in _progress(chosen):
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
        _as_json(
            [
                {"kernel": name, "arch": each, **asdict(cost), "problems": problems[name, each]}
                for name, costs in found.items()
                for each, cost in costs.items()
            ]
        )
    else:
        titles = ("kernel", "arch", "registers", "stack", "spills", "shared", "matrix", "loads 16 B / less", "")
        _show(
            titles,
            [
                (name, each, c.registers, c.stack, c.spills, f"{c.shared:,}", _matrix(c, each),
                 f"{c.wide_loads} / {c.narrow_loads}", "; ".join(problems[name, each]))
                for name, costs in found.items()
                for each, c in costs.items()
            ],
            right=(2, 3, 4, 5),
        )  # fmt: skip
        above = sum(map(bool, problems.values()))
        verdict = f"{above} above what was recorded" if above else "none above what was recorded"
        typer.echo(f"{len(problems)} kernels, {verdict} with Triton {machine_code.version()}")
    if any(problems.values()):
        raise typer.Exit(1)


def _matrix(cost: Any, architecture: str) -> str:
    """Kind and number of matrix instructions."""
    if cost.wgmma:
        return f"{cost.wgmma} {'tcgen05' if architecture == 'sm_100' else 'wgmma'}"
    return f"{cost.mma} mma" if cost.mma else "none"


def _progress(chosen: Sequence[Any]) -> Iterable[Any]:
    """The items, with a bar on a terminal."""
    from rich.progress import track

    from specdec_fast.commands.show import make_console

    console = make_console(stderr=True)
    return track(chosen, "compiling", console=console, transient=True, disable=not console.is_terminal)


@app.command()
def bench(
    ops: Ops = None,
    shape: Annotated[
        list[str] | None, typer.Option("--size", "-s", help="NAME=VALUE for one operator; may be repeated.")
    ] = None,
    device: Device = None,
    rounds: Annotated[int, typer.Option(help="Timed rounds per backend.")] = 50,
    as_json: options.Json = False,
) -> None:
    """Time every backend, beside what the device can copy, read and multiply in the same run.

    Other people's kernels are timed by `python -m benchmarks.kernels.gpu`, in the repository.
    """
    from specdec_kernels import timing

    names = _names(ops)
    if shape and len(names) != 1:
        raise ValueError("kernels: --size goes with one operator; name it")
    if rounds < 1:
        raise ValueError(f"kernels: got {rounds} rounds; expected at least 1")
    where = _device(device)
    sizes = _sizes(names[0], shape) if shape else None
    limit = timing.measure_ceilings(where)
    rows = list(timing.bench(names, where, sizes, rounds, limit))
    if as_json:
        _as_json({"device": str(where), "ceilings": asdict(limit), "times": [asdict(row) for row in rows]})
        return
    print(f"{where}: copy {limit.copy:,.1f} GB/s, read {limit.read:,.1f} GB/s, product {limit.multiply:,.2f} TFLOP/s")
    _show(
        ("operator", "backend", "shape", "us", "GB/s", "TFLOP/s", "of the limit"),
        [
            (r.op, r.backend, r.sizes, *((f"no: {r.reason}", None, None, None) if r.microseconds is None else (
                f"{r.microseconds:,.1f}", f"{r.gigabytes_per_s:,.1f}",
                None if r.teraflops_per_s is None else f"{r.teraflops_per_s:,.2f}", f"{r.share:.0%}")))
            for r in rows
        ],
        right=(3, 4, 5, 6),
    )  # fmt: skip
