"""`specdec info`: versions, processor, operators with their backends, and bundled models."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from specdec_fast.commands import options
from specdec_fast.commands.json_output import print_json


def info(as_json: options.Json = False) -> None:
    """Show versions, processor, operators with their backends, rules, drafters and bundled models."""
    found = collect()
    if as_json:
        print_json(found)
        return
    _print(found)


def collect() -> dict[str, Any]:
    """Returns the content of `specdec info` as JSON values."""
    import torch

    from specdec_fast.commands.open_engine import versions
    from specdec_fast.drafters import drafter_names
    from specdec_fast.rules import rule_names
    from specdec_kernels import OPS
    from specdec_kernels.dispatch.extension import unavailable_reason

    reason = unavailable_reason()
    return {
        "versions": versions(),
        "cpu": {
            "name": processor(),
            "architecture": platform.machine(),
            "isa": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        "cuda": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "extension": {"built": reason is None, "reason": reason},
        "ops": [dict(row._asdict()) for op in OPS.values() for row in op.explain()],
        "rules": rule_names(),
        "drafters": drafter_names(),
        "assets": assets(),
    }


def processor() -> str:
    """Returns the processor's name, or its architecture if the system reports no name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def assets() -> list[dict[str, Any]]:
    """Returns name, bytes and number of parameters of the bundled models and heads."""
    from specdec_fast.loading import ASSETS

    entries = sorted(ASSETS.iterdir()) if ASSETS.is_dir() else []
    return [
        {"name": entry.name, "bytes": _size(entry), "parameters": num_parameters(entry)}
        for entry in entries
        if entry.is_dir() and not entry.name.startswith((".", "_"))
    ]


def _size(entry: Path) -> int:
    files = entry.rglob("*") if entry.is_dir() else [entry]
    return sum(file.stat().st_size for file in files if file.is_file())


def num_parameters(folder: Path) -> int | None:
    """Returns the number of parameters in a folder's safetensors files, or None without such files."""
    import math

    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    count = 0
    for file in files:
        with safe_open(file, "pt") as weights:
            count += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    return count if files else None


def _print(found: dict[str, Any]) -> None:
    from rich.table import Table

    from specdec_fast.commands.terminal_output import make_console

    out = make_console()
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    named = ", ".join(f"{name} {number or 'not installed'}" for name, number in found["versions"].items())
    cpu, extension = found["cpu"], found["extension"]
    facts.add_row("versions", named)
    facts.add_row("cpu", f"{cpu['name']}, {cpu['architecture']}, {cpu['isa']}, threads: {cpu['threads']}")
    facts.add_row("cuda", ", ".join(found["cuda"]) or "none")
    facts.add_row("extension", "built" if extension["built"] else f"not usable: {extension['reason']}")
    facts.add_row("rules", ", ".join(found["rules"]))
    facts.add_row("drafters", ", ".join(found["drafters"]))
    facts.add_row("bundled", "\n".join(_describe(asset) for asset in found["assets"]) or "nothing")
    out.print(facts)
    print_operators(found["ops"])


def print_operators(ops: list[dict[str, Any]]) -> None:
    """Prints the backends of every operator, and each reason why others cannot serve."""
    from specdec_fast.commands.terminal_output import make_console, print_table

    out = make_console()
    print_table(out, _table(("operator", "served by", "also available"), _serving(ops)))
    print_table(out, _table(("backend", "does not serve, because", "operators"), _refusing(ops)))


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(*titles, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


def _serving(ops: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Lists every operator with its available backends, the selected one first."""
    for op in dict.fromkeys(row["op"] for row in ops):
        own = [row for row in ops if row["op"] == op]
        selected = ", ".join(row["backend"] for row in own if row["chosen"])
        ready = ", ".join(row["backend"] for row in own if row["reason"] is None and not row["chosen"])
        yield op, selected, ready


def _refusing(ops: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Lists every reason once, with its operators."""
    having = Counter(row["backend"] for row in ops)
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in ops:
        if row["reason"] is not None:
            reasons.setdefault((row["backend"], row["reason"]), []).append(row["op"])
    for (backend, reason), names in sorted(reasons.items()):
        whole = len(names) == having[backend]
        yield backend, reason, f"all {len(names)} that have it" if whole else ", ".join(names)


def _describe(asset: dict[str, Any]) -> str:
    parameters = f", {asset['parameters'] / 1e6:.2f} M parameters" if asset["parameters"] else ""
    return f"{asset['name']}: {asset['bytes'] / 1e6:.2f} MB{parameters}"
