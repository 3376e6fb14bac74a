"""Times of all operators on a GPU, beside peers and ceilings of the same run, as JSON and one HTML page.

    python -m benchmarks.kernels.gpu --out results/       # partial results are on disk after every operator

Ours are timed by `specdec_kernels.timing`: graph replay over copies of the data that exceed the L2 cache four times.
Peers are timed the same way: torch's scaled_dot_product_attention with a mask, index_copy per layer, log_softmax and
topk, unfold and compare. There are no other libraries in this file.
"""

from __future__ import annotations

import argparse
import html
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from specdec_kernels import OPS, plan_for, tree_attention
from specdec_kernels.agreement import SAMPLES, check
from specdec_kernels.samples import Call, Sizes
from specdec_kernels.timing import Timing, bench, copies, describe, graph_time, host_time, measure_ceilings


def sdpa_with_mask(call: Call) -> Callable[[], Any]:
    """scaled_dot_product_attention over keys that already lie side by side, with the tree as a boolean mask."""
    query, keys, _, table, *_ = call.arguments
    rows, heads, width = table.shape[0], query.shape[1], query.shape[2]
    nodes, kv_heads = query.shape[0] // rows, keys.shape[2]
    length = keys.shape[1] * table.shape[1]
    q = query.view(rows, nodes, heads, width).transpose(1, 2).contiguous()
    k, v = (torch.randn(rows, kv_heads, length, width, device=query.device).to(query.dtype) for _ in range(2))
    mask = torch.ones(nodes, length, dtype=torch.bool, device=query.device).tril(length - nodes)
    return partial(scaled_dot_product_attention, q, k, v, attn_mask=mask, enable_gqa=heads != kv_heads)


def index_copy_per_layer(call: Call) -> Callable[[], Any]:
    """What a stack without a commit kernel does: one gather and one scatter per layer and side."""
    caches = list(call.arguments[0])
    flat = [cache.flatten(0, 1) for cache in caches]
    moved = call.arguments[3].shape[0] * (call.arguments[3].shape[1] - 1)
    source = torch.arange(moved, device=flat[0].device) + moved + 1
    target = torch.arange(moved, device=flat[0].device) + 1

    def run() -> None:
        for cache in flat:
            cache.index_copy_(0, target, cache.index_select(0, source))

    return run


def topk_of_log_softmax(call: Call) -> Callable[[], Any]:
    """Children by torch's own operators: two passes over the logits and one search, without the best of each tree."""
    logits, _, _, _, _, scores = call.arguments
    return lambda: (scores[:, None] + logits.float().log_softmax(1)).topk(call.options["width"], 1)


def unfold_and_compare(call: Call) -> Callable[[], Any]:
    """The longest suffix only, over rows of equal length: every window beside the newest tokens."""
    tokens, starts, _, n_max, _, wanted = call.arguments
    rows = tokens.view(starts.shape[0], -1)
    ahead = torch.arange(wanted, device=tokens.device)

    def run() -> torch.Tensor:
        same = (rows[:, :-1].unfold(1, n_max, 1) == rows[:, None, -n_max:]).all(2)
        index = torch.arange(same.shape[1], device=tokens.device)
        last = torch.where(same, index, 0).amax(1) + n_max
        return rows.gather(1, (last[:, None] + ahead).clamp(max=rows.shape[1] - 1))

    return run


def on_a_fixed_grid(call: Call) -> Callable[[], Any]:
    """Ours with a plan, which is made before: it costs once per pass what a layer's launches cost."""
    query, keys, _, table, lengths, offsets, ancestors, _ = call.arguments
    plan = plan_for(query, keys, table, lengths, offsets, ancestors)
    if plan is None:
        raise RuntimeError("no plans: tree_attention is not served by triton")
    return partial(tree_attention, *call.arguments, **call.options, plan=plan)


PEERS: dict[str, list[tuple[str, Callable[[Call], Callable[[], Any]]]]] = {
    "tree_attention": [("torch sdpa with mask", sdpa_with_mask), ("triton with a plan", on_a_fixed_grid)],
    "kv_commit": [("torch index_copy per layer", index_copy_per_layer)],
    "tree_expand": [("torch log_softmax and topk", topk_of_log_softmax)],
    "ngram_match": [("torch unfold and compare", unfold_and_compare)],
}


def peers(op: str, device: torch.device, rounds: int, shapes: tuple[Sizes, ...]) -> Iterator[Timing]:
    """Times of what others would do; a peer that fails is reported with its reason."""
    for name, make in PEERS.get(op, []):
        for sizes in shapes:
            words = describe(op, sizes)
            try:
                runs = [make(call) for call in copies(op, sizes, device)]
                seconds = (graph_time if device.type == "cuda" else host_time)(runs, rounds)
                yield Timing(op, name, words, seconds * 1e6)
            except (RuntimeError, ValueError) as error:
                yield Timing(op, name, words, None, reason=str(error).splitlines()[0])


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
                f"{row['share']:.0%}" if row["share"] else None,
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
            print(row.op, row.backend, row.dtype, "agrees" if row.ran and row.agrees else row.reason, flush=True)
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
        found["agreement"] += [asdict(each) for each in check([op], device=device)]
        shapes = SAMPLES[op].gpu if device.type == "cuda" and SAMPLES[op].gpu else (Sizes(),)
        found["times"] += [asdict(each) for each in bench([op], device, None, options.rounds, limit)]
        found["times"] += [asdict(each) for each in peers(op, device, options.rounds, shapes)]
        (options.out / "kernels.json").write_text(json.dumps(found, indent=1))
        (options.out / "kernels.html").write_text(page(found))
        print(f"{op}: done", flush=True)


if __name__ == "__main__":
    main()
