"""The losslessness lab: exact enumeration, statistics over many draws, plots and a report (`specdec lab`).

`exact` enumerates rules over all coins against rational arithmetic; `draws` runs them through production randomness on
real laws; `statistics` and `sequential` judge counts; `recorded` takes draws of foreign samplers. Nothing heavy is
imported here; the extra `lab` brings scipy, matplotlib and jinja2. Tests: tests/lab/.
"""

from __future__ import annotations

from importlib.util import find_spec

EXTRA = ("scipy", "matplotlib", "jinja2")


def require_extra() -> None:
    """Raise ValueError, with the remedy, unless the packages of the extra `lab` are installed."""
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        from specdec_kernels.extras import install

        raise ValueError(f"lab: {', '.join(missing)} not installed; {install('lab')}")
