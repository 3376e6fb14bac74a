"""Times of all operators on a GPU, beside peers and ceilings of the same run, as JSON.

    python -m benchmarks.kernels.gpu --out results/             # ours: kernels.json is whole after every shape
    python -m benchmarks.kernels.gpu --out results/ --peers     # peers, in turns with ours: peers.json

Ours are timed by `specdec_kernels.inspection.timing`: graph replay over copies of the data that exceed the L2 cache
four times. The first shape of every operator comes before the second of any. Peers (`benchmarks/kernels/peers.py`)
that take long to prepare come after all others.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.result_files import write_whole
from benchmarks.kernels.peers import PEERS, Peer
from specdec_kernels import OPS
from specdec_kernels.inspection.timing import (
    MAX_COPIES,
    Ceilings,
    Timing,
    bench,
    copies,
    describe,
    graph_times,
    host_times,
    make_timing,
    measure_ceilings,
    shapes_of,
)
from specdec_kernels.testing.agreement import SAMPLES, TOLERANCE, make_timed_sample, tensors_in
from specdec_kernels.testing.samples_attention import Sizes

TINY_COPIES = 4
"""Copies of a call's tensors with --tiny, whose times mean nothing."""


def peers(
    op: str,
    device: torch.device,
    rounds: int,
    shapes: tuple[Sizes, ...],
    late: bool | None = None,
    limit: Ceilings | None = None,
    most_copies: int = MAX_COPIES,
) -> Iterator[Timing]:
    """Times our operator and its peers in alternation; a peer that cannot run is reported with its reason.

    Args:
        op: Name of the operator.
        device: Where all run.
        rounds: Timed rounds of each side.
        shapes: Sizes of the operator's sample.
        late: True for peers that take long to prepare, False for the others, None for all.
        limit: The device's ceilings, for shares.
        most_copies: Most copies of a call's tensors.
    """
    selected = [peer for peer in PEERS if peer.op == op and late in (None, peer.late)]
    for sizes in shapes if selected else ():
        words, calls = describe(op, sizes), copies(op, sizes, device, most_copies)
        calls = calls if device.type == "cuda" else calls[: rounds + 1]  # as many as are called
        sides: dict[str, list[Callable[[], Any]]] = {
            f"ours ({OPS[op].choose_backend(*calls[0].arguments, **calls[0].options)})": [
                call.repeatable(OPS[op]) for call in calls
            ]
        }
        clock = graph_times if device.type == "cuda" else host_times
        for peer in selected:
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
        for name, spread in clock(sides, rounds).items():
            yield make_timing(op, name, words, calls, spread, limit, device)


def differs(peer: Peer, sizes: Sizes, device: torch.device) -> str | None:
    """Returns how a peer's result, or its content of the caches, differs from ours, or None."""
    theirs, ours = (make_timed_sample(device, peer.op, sizes) for _ in range(2))
    got, want = peer.make(theirs)(), OPS[peer.op](*ours.arguments, **ours.options)
    pairs = [*zip(tensors_in(got), tensors_in(want)), *zip(theirs.writes, ours.writes)]
    pairs = [
        (one, other) for one, other in pairs if other.is_floating_point()
    ]  # only our operator writes cache lengths
    if not pairs:
        return "nothing to compare; not timed"
    for one, other in pairs:
        worst = float((one.float() - other.float()).abs().max())
        if not worst <= TOLERANCE[other.dtype] * 10 * max(1.0, float(other.float().abs().max())):
            return f"differs from ours by {worst:.2g}; not timed"
    return None


def shapes_in_turn(ops: list[str], device: torch.device, tiny: bool) -> Iterator[tuple[str, Sizes]]:
    """Yields the first shape of every operator, then the second, and so on; with `tiny`, one small shape of each."""
    shapes = {op: (Sizes(),) if tiny else shapes_of(op, device) for op in ops}
    for place in range(max(map(len, shapes.values()))):
        yield from ((op, own[place]) for op, own in shapes.items() if place < len(own))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of kernels.json or peers.json")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peers", action="store_true", help="time peers in turns with ours, not all backends of ours")
    parser.add_argument("--tiny", action="store_true", help="one small shape of each operator, on few copies")
    parser.add_argument("ops", nargs="*", help="operators; all by default")
    options = parser.parse_args()
    unknown = set(options.ops) - set(OPS)
    if unknown:
        parser.error(f"no operators {sorted(unknown)}; there are {', '.join(OPS)}")
    device, ops = torch.device(options.device), options.ops or list(SAMPLES)
    limit = measure_ceilings(device, tiny=options.tiny)
    most = TINY_COPIES if options.tiny else MAX_COPIES
    times: list[dict[str, Any]] = []
    found = {"machine": machine(device) | asdict(limit), "times": times}
    for late in (False, True) if options.peers else (None,):
        for op, sizes in shapes_in_turn(ops, device, options.tiny):
            if options.peers:
                rows = peers(op, device, options.rounds, (sizes,), late, limit, most)
            else:
                rows = bench([op], device, sizes, options.rounds, limit, most_copies=most)
            for row in rows:
                times.append(asdict(row))
                print(f"{row.op}: {row.sizes}: {row.backend}: {in_words(row)}", flush=True)
            write_whole(options.out / ("peers.json" if options.peers else "kernels.json"), found)


def machine(device: torch.device) -> dict[str, Any]:
    """Returns device and versions, for result files."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def in_words(row: Timing) -> str:
    """Returns a time with its spread, or the reason for its absence."""
    if row.microseconds is None:
        return f"not timed: {row.reason}"
    return f"{row.microseconds:.1f} us ({row.p10:.1f} to {row.p90:.1f})"


if __name__ == "__main__":
    main()
