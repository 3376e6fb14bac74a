"""Arguments of `specdec kernels`: names of operators, devices, and sizes of sample calls.

Tests: tests/commands/test_kernels.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def operator_names(wanted: Sequence[str] | None) -> list[str]:
    """Returns the requested operators, or all.

    Raises:
        ValueError: If one does not exist.
    """
    from specdec_kernels import OPS
    from specdec_kernels.unknown_names import RENAMED_OPERATORS, unknown_name

    for name in wanted or ():
        if name not in OPS:
            raise ValueError(unknown_name("kernels operator", name, OPS, renamed=RENAMED_OPERATORS, kind="operator"))
    return list(dict.fromkeys(wanted or OPS))


def select_device(name: str | None) -> Any:
    """Returns the named torch device, by default a GPU if there is one."""
    import torch

    from specdec_fast.loading import check_device

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    check_device(name, "--device")
    return torch.device(name)


def _usable_memory() -> int:
    """Returns half of the bytes that this process may use."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        total = 16 << 30
    limit = Path("/sys/fs/cgroup/memory.max")
    words = limit.read_text().strip() if limit.exists() else ""
    return min(total, int(words) if words.isdigit() else total) // 2


def _parse_size(word: str, name: str, value: str) -> int:
    """Parses one size; raises ValueError unless it is a whole number within its bounds."""
    from specdec_kernels.testing.samples_attention import BOUNDS

    least, most = BOUNDS[name]
    number = int(value) if value.isascii() and value.isdigit() and len(value) < 16 else -1
    if not least <= number <= most:
        raise ValueError(f"kernels: got {word!r}; expected a whole number of at least {least} and at most {most:,}")
    return number


def parse_sizes(op: str, words: Sequence[str]) -> Any:
    """Parses the sizes of a sample call.

    Args:
        op: Name of the operator.
        words: Sizes as NAME=VALUE.

    Returns:
        The sizes, as `specdec_kernels.testing.samples_attention.Sizes`.

    Raises:
        ValueError: If the operator has no such size, or cannot take the value.
    """
    from specdec_kernels.testing.agreement import SAMPLES
    from specdec_kernels.testing.samples_attention import Sizes, estimate_bytes
    from specdec_kernels.unknown_names import hint, unknown_name

    known = SAMPLES[op].names
    dtypes = {str(each).removeprefix("torch."): each for each in SAMPLES[op].dtypes}
    values: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            expected = f"NAME=VALUE with a name of {op}: {', '.join(known)}"
            raise ValueError(f"kernels: got {word!r}; expected {expected}{hint(name, known)}")
        if name == "dtype":
            if value not in dtypes:
                raise ValueError(unknown_name("kernels dtype", value, dtypes))
            values[name] = dtypes[value]
        elif name == "top_p":
            values[name] = _parse_probability(word, value)
        else:
            values[name] = _parse_size(word, name, value)
    sizes = Sizes(**values)
    if "heads" in known and "kv_heads" in known and sizes.heads % sizes.kv_heads:
        raise ValueError(
            f"kernels: got heads={sizes.heads} and kv_heads={sizes.kv_heads}; expected a multiple of kv_heads as heads"
        )
    needed, have = estimate_bytes(known, sizes), _usable_memory()
    if needed > have:
        raise ValueError(
            f"kernels: got sizes of {needed / 2**30:,.0f} GiB or so; expected at most half of this machine's memory, "
            f"{have / 2**30:,.0f} GiB; choose smaller ones"
        )
    return sizes


def _parse_probability(word: str, value: str) -> float:
    """Parses a number above 0 and at most 1."""
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"kernels: got {word!r}; expected a number above 0 and at most 1; 1 is off")
    return share
