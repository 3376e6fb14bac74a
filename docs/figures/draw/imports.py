"""Which packages of this repository import which, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCES = {"specdec_fast": ROOT / "specdec_fast", "specdec_kernels": ROOT / "kernels" / "specdec_kernels"}

Graph = dict[str, set[str]]


def names(tree: ast.AST, module: Sequence[str] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every import of a file, lazy ones too.

    Args:
        tree: The parsed file.
        module: The names of the packages that it is in, for relative imports.

    Yields:
        The full name of a module, and what is taken from it.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module[: len(module) - node.level + 1] if node.level else ()
            yield ".".join([*above, *([node.module] if node.module else [])]), tuple(each.name for each in node.names)


def parts(source: Path) -> dict[str, list[Path]]:
    """The files of each package and of each module beside them, by name."""
    found: dict[str, list[Path]] = {}
    for file in sorted(source.rglob("*.py")):
        found.setdefault(file.relative_to(source).parts[0].removesuffix(".py"), []).append(file)
    return found


def graph(package: str, sources: Mapping[str, Path] = SOURCES) -> tuple[Graph, Graph]:
    """Imports among the parts of a package, and those of other packages in `sources`, by part."""
    own = parts(sources[package])
    inside: Graph = {part: set() for part in own}
    outside: Graph = {part: set() for part in own}
    for part, files in own.items():
        for file in files:
            above = (package, *file.relative_to(sources[package]).parts[:-1])
            for module, taken in names(ast.parse(file.read_text(encoding="utf-8")), above):
                first, *rest = module.split(".")
                if first == package:
                    wanted = [rest[0]] if rest else [each if each in own else "__init__" for each in taken]
                    inside[part].update(each for each in wanted if each in own and each != part)
                elif first in sources:
                    outside[part].add(first)
    return inside, outside


def condensed(edges: Graph) -> Graph:
    """The graph with one part, named after all of its members, in place of each cycle."""
    below = {part: reachable(edges, part) for part in edges}
    name = {part: " ".join(sorted({part} | {other for other in below[part] if part in below[other]})) for part in edges}
    found: Graph = {each: set() for each in name.values()}
    for part, wanted in edges.items():
        found[name[part]].update(name[other] for other in wanted if name[other] != name[part])
    return found


def reachable(edges: Graph, start: str) -> set[str]:
    """All parts that a part imports, through others too."""
    found: set[str] = set()
    todo = list(edges[start])
    while todo:
        part = todo.pop()
        if part not in found:
            found.add(part)
            todo.extend(edges[part])
    return found


def reduced(edges: Graph) -> Graph:
    """The imports that do not follow from others; of a graph without cycles."""
    below = {part: reachable(edges, part) for part in edges}
    return {
        part: {other for other in wanted if not any(other in below[between] for between in wanted - {other})}
        for part, wanted in edges.items()
    }


def levels(edges: Graph) -> dict[str, int]:
    """The level of each part: 0 imports no other, and each is one above the highest that it imports."""
    found: dict[str, int] = {}

    def level(part: str, above: tuple[str, ...] = ()) -> int:
        if part in above:
            raise ValueError(
                f"imports: got the cycle {' -> '.join((*above[above.index(part) :], part))}; expected none"
            )
        if part not in found:
            found[part] = max((level(other, (*above, part)) + 1 for other in sorted(edges[part])), default=0)
        return found[part]

    for part in sorted(edges):
        level(part)
    return found


def home(name: str) -> str:
    """The path of the module that defines a class or function, without the suffix.

    Args:
        name: The class or function.

    Returns:
        The path from the root of its package; that of the folder for a name that an `__init__` defines.

    Raises:
        ValueError: If no module or more than one defines it.
    """
    found = sorted(file for file, defined in _definitions().items() if name in defined)
    found = [file for file in found if file.endswith("__init__.py")] or found  # the public function of an operator
    if len(found) != 1:
        raise ValueError(f"{name}: got {len(found)} modules that define it; expected one; mend the figure")
    return found[0].removesuffix(".py").removesuffix("/__init__")


@cache
def _definitions() -> dict[str, set[str]]:
    """The classes and functions that each module defines, by its path."""
    found = {}
    for package, source in SOURCES.items():
        for file in sorted(source.rglob("*.py")):
            body = ast.parse(file.read_text(encoding="utf-8")).body
            defined = {node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
            assigned = [node.targets[0] for node in body if isinstance(node, ast.Assign)]
            defined.update(each.id for each in assigned if isinstance(each, ast.Name))  # `tree_plan = Op(...)`
            found[f"{package}/{file.relative_to(source)}"] = defined
    return found


def constant(name: str, beside: str) -> int:
    """The value of a number that a module assigns to a name at its top.

    Args:
        name: The name.
        beside: A class or function of the same module.
    """
    package, _, rest = home(beside).partition("/")
    tree = ast.parse((SOURCES[package] / f"{rest}.py").read_text(encoding="utf-8"))
    found = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name]
    return int(ast.literal_eval(found[0]))
