"""Times of all operators on a GPU, beside peers and ceilings of the same run, as JSON and one HTML page.

    python -m benchmarks.kernels.gpu --out results/       # partial results are on disk after every operator

Ours are timed by `specdec_kernels.timing`: graph replay over copies of the data that exceed the L2 cache four times.
Peers (`benchmarks/kernels/peers.py`) take turns with ours.
"""

from __future__ import annotations

import argparse
import html
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.peers import PEERS, Peer
from specdec_kernels import OPS
from specdec_kernels.agreement import SAMPLES, TOLERANCE, check, sample, tensors_in
from specdec_kernels.samples import Sizes
from specdec_kernels.timing import (
    Timing,
    bench,
    copies,
    describe,
    graph_times,
    host_times,
    measure_ceilings,
)


def peers(op: str, device: torch.device, rounds: int, shapes: tuple[Sizes, ...]) -> Iterator[Timing]:
    """Ours and what others do, taking turns; a peer that cannot is reported with its reason."""
    chosen = [peer for peer in PEERS if peer.op == op]
    for sizes in shapes if chosen else ():
        words, calls = describe(op, sizes), copies(op, sizes, device)
        calls = calls if device.type == "cuda" else calls[: rounds + 1]  # as many as are called
        sides: dict[str, list[Callable[[], Any]]] = {
            f"ours ({OPS[op].choose(*calls[0].arguments, **calls[0].options)})": [call.often(OPS[op]) for call in calls]
        }
        clock = graph_times if device.type == "cuda" else host_times
        for peer in chosen:
            try:
                reason = peer.missing(device)
                if reason is None:
                    runs = [peer.make(call) for call in calls]
                    reason = differs(peer, sizes, device) if peer.same else None
                    if reason is None:
                        clock({peer.name: runs}, 1 if clock is graph_times else len(runs))  # all: none fails below
            except Exception as error:  # whatever another project raises
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            if reason is None:
                sides[peer.name] = runs
            else:
                yield Timing(op, peer.name, words, None, reason=reason)
        yield from (Timing(op, name, words, seconds * 1e6) for name, seconds in clock(sides, rounds).items())


def differs(peer: Peer, sizes: Sizes, device: torch.device) -> str | None:
    """How a peer's answer, or what it leaves in the caches, differs from ours, or None."""
    theirs, ours = (sample(peer.op, sizes, device) for _ in range(2))
    got, want = peer.make(theirs)(), OPS[peer.op](*ours.arguments, **ours.options)
    pairs = [*zip(tensors_in(got), tensors_in(want)), *zip(theirs.writes, ours.writes)]
    pairs = [(one, other) for one, other in pairs if other.is_floating_point()]  # lengths of a cache are ours to write
    if not pairs:
        return "nothing to compare; not timed"
    for one, other in pairs:
        worst = float((one.float() - other.float()).abs().max())
        if not worst <= TOLERANCE[other.dtype] * 10 * max(1.0, float(other.float().abs().max())):
            return f"differs from ours by {worst:.2g}; not timed"
    return None


def page(found: dict[str, Any]) -> str:
    """The report as one HTML page without anything from elsewhere."""
    head = "".join(f"<p>{html.escape(f'{k}: {v}')}</p>" for k, v in found["machine"].items())
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape('' if cell is None else str(cell))}</td>" for cell in cells) + "</tr>"
        for cells in (
            (
                row["op"], row["backend"], row["sizes"],
                f"{row['microseconds']:.1f}" if row["microseconds"] else f"no: {row['reason']}",
                f"{row['gigabytes_per_s']:.0f}" if row["gigabytes_per_s"] else None,
                f"{row['teraflops_per_s']:.1f}" if row["teraflops_per_s"] else None,
                f"{row['share']:.0%}{' (in cache)' if row['cached'] else ''}" if row["share"] else None,
            )
            for row in found["times"]
        )
    )  # fmt: skip
    wrong = "".join(f"<li>{html.escape(json.dumps(each))}</li>" for each in found["agreement"] if not each["agrees"])
    titles = "".join(f"<th>{t}</th>" for t in ("operator", "backend", "shape", "us", "GB/s", "TFLOP/s", "of the limit"))
    return (
        "<!doctype html><meta charset=utf-8><title>specdec-fast kernels</title>"
        "<style>body{font:14px sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:left}"
        "tr:nth-child(even){background:#f4f4f4}</style><h1>Kernels</h1>"
        f"{head}<h2>Backends that differ from the reference</h2><ul>{wrong or '<li>none</li>'}</ul>"
        f"<h2>Times</h2><table><tr>{titles}</tr>{rows}</table>"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of kernels.json and kernels.html")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--check", action="store_true", help="only compare backends; exit status 1 if one differs")
    parser.add_argument("ops", nargs="*", help="operators; all by default")
    options = parser.parse_args()
    unknown = set(options.ops) - set(OPS)
    if unknown:
        parser.error(f"no operators {sorted(unknown)}; there are {', '.join(OPS)}")
    device, ops = torch.device(options.device), options.ops or list(SAMPLES)
    if options.check:
        rows = list(check(ops, device=device))
        for row in rows:
            print(
                row.op, row.backend, row.dtype, row.case, "agrees" if row.ran and row.agrees else row.reason, flush=True
            )
        raise SystemExit(not all(row.agrees for row in rows))
    options.out.mkdir(parents=True, exist_ok=True)
    limit = measure_ceilings(device)
    found: dict[str, Any] = {
        "machine": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
            "torch": torch.__version__, "python": platform.python_version(), **asdict(limit),
        },
        "agreement": [], "times": [],
    }  # fmt: skip
    for op in ops:
        found["agreement"] += [asdict(each) for each in check([op], device=device, only=("",))]
        shapes = SAMPLES[op].gpu if device.type == "cuda" and SAMPLES[op].gpu else (Sizes(),)
        found["times"] += [asdict(each) for each in bench([op], device, None, options.rounds, limit)]
        for each in peers(op, device, options.rounds, shapes):
            found["times"].append(asdict(each))
            if each.reason is not None:
                print(f"{op}: {each.backend}: skipped: {each.reason}", flush=True)
        for name, text in (("kernels.json", json.dumps(found, indent=1)), ("kernels.html", page(found))):
            (options.out / f"{name}.new").write_text(text)
            (options.out / f"{name}.new").replace(options.out / name)  # whoever ends us leaves a whole file
        print(f"{op}: done", flush=True)


if __name__ == "__main__":
    main()
