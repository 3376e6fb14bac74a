"""Optional packages, and the extras of pyproject.toml that install them.

Tests: tests/test_extras.py.
"""

from __future__ import annotations

from importlib.util import find_spec

EXTRAS = {
    "lab": ("scipy", "matplotlib", "jinja2"),
    "tune": ("optuna", "scipy", "matplotlib"),
    "train": ("accelerate", "matplotlib"),
    "grammar": ("llguidance",),
    "xgrammar": ("xgrammar",),
    "datastore": ("pyarrow",),
    "gguf": ("gguf", "accelerate"),
    "adapter": ("peft",),
    "device-map": ("accelerate",),
    "ray": ("ray",),
    "serve": ("fastapi", "uvicorn", "prometheus_client"),
}
"""Extra -> packages that it must have installed. Some extras install more, for speed."""


def require(extra: str, what: str, *packages: str) -> None:
    """Checks that the packages of an extra are installed.

    Args:
        extra: Name of the extra.
        what: What needs the packages, for the message.
        *packages: The packages that are needed; by default all of the extra.

    Raises:
        ValueError: If a package is missing. The message names the command that installs it.
    """
    missing = [name for name in packages or EXTRAS[extra] if find_spec(name) is None]
    if missing:
        from specdec_kernels.dispatch.extras import install_hint  # imports torch, which help pages do not load

        are = "is" if len(missing) == 1 else "are"
        raise ValueError(
            f"{what}: {', '.join(missing)} {are} not installed; expected the extra {extra!r}; {install_hint(extra)}"
        )
