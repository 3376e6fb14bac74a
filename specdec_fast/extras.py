"""Packages that only parts of the program need, and the extras of pyproject.toml that bring them.

Tests: tests/test_extras.py.
"""

from __future__ import annotations

from importlib.util import find_spec

EXTRAS = {
    "lab": ("scipy", "matplotlib", "jinja2"),
    "tune": ("optuna", "scipy", "matplotlib"),
    "train": ("accelerate", "matplotlib"),
    "grammar": ("llguidance",),
    "datastore": ("pyarrow",),
}
"""What an extra must have brought; some bring more, for speed."""


def require(extra: str, what: str, *packages: str) -> None:
    """Raise ValueError, with the remedy, unless the packages of an extra are installed.

    what: who needs them; packages: which of them (default: all).
    """
    missing = [name for name in packages or EXTRAS[extra] if find_spec(name) is None]
    if missing:
        from specdec_kernels.dispatch.extras import install  # brings torch, which help pages do without

        are = "is" if len(missing) == 1 else "are"
        raise ValueError(
            f"{what}: {', '.join(missing)} {are} not installed; expected the extra {extra!r}; {install_hint(extra)}"
        )
