"""Draws figures, checks that the committed ones are up to date, or records the runs that they show."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from docs.figures.draw import compare, style

HERE = Path(__file__).resolve().parent
FIGURES, DATA = HERE.parent, HERE.parent / "data"


def drawers() -> dict[str, ModuleType]:
    """The module of each figure, by the figure's name."""
    files = sorted(file for folder in ("diagrams", "plots") for file in (HERE / folder).glob("[!_]*.py"))
    return {
        file.stem.replace("_", "-"): import_module(f"docs.figures.draw.{file.parent.name}.{file.stem}")
        for file in files
    }


def drawn(module: ModuleType) -> str:
    """The SVG file of a figure as it is drawn now."""
    return style.svg(module.draw, module.TITLE, module.DESCRIPTION)


def stale(name: str, module: ModuleType, folder: Path = FIGURES) -> str | None:
    """How the committed figure differs from the one that is drawn now; None if it does not."""
    file = folder / f"{name}.svg"
    if not file.exists():
        return f"{file.name} does not exist; run make figures"
    found = compare.differences(file.read_text(encoding="utf-8"), drawn(module))
    return f"{file.name} is out of date ({'; '.join(found[:3])}); run make figures" if found else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program."""
    modules = drawers()
    parser = argparse.ArgumentParser("python -m docs.figures.draw", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="FIGURE", help=f"default: all of {', '.join(modules)}")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a committed figure is out of date")
    parser.add_argument("--record", action="store_true", help="run what the figures show again before they are drawn")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(modules))
    if unknown:
        parser.error(f"figures: got {', '.join(unknown)}; expected some of {', '.join(modules)}")
    failed = 0
    for name in options.names or modules:
        module = modules[name]
        if options.record and hasattr(module, "record"):
            record = json.dumps(module.record(), indent=1, ensure_ascii=False)
            (DATA / f"{name}.json").write_text(record + "\n", encoding="utf-8")
        if options.check:
            reason = stale(name, module)
            failed += reason is not None
            print(reason or f"{name}.svg is up to date", flush=True)
        else:
            (FIGURES / f"{name}.svg").write_text(drawn(module), encoding="utf-8")
            print(f"docs/figures/{name}.svg", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
