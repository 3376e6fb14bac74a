"""The project's root, its files and its documents, for tests that read the source tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {".git", ".venv", "build", "dist", "__pycache__"}
AT_THE_ROOT = "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md"
"""Documents that are not pages of docs/."""


def listed_files(root: Path) -> list[Path]:
    """Files of a tree: those that git tracks or would track, or all that are not generated where there is no git."""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
        return sorted(root / name for name in set(names) if name and (root / name).is_file())
    found = (path for path in root.rglob("*") if path.is_file() and path.suffix not in (".so", ".o"))
    return sorted(
        path
        for path in found
        if not any(part in GENERATED or part.endswith(".egg-info") for part in path.relative_to(root).parts)
    )


def all_documents(root: Path) -> list[Path]:
    """The documents of the root and all pages of docs/."""
    pages = [path for path in listed_files(root) if path.suffix == ".md" and root / "docs" in path.parents]
    return [root / name for name in AT_THE_ROOT if (root / name).exists()] + pages
