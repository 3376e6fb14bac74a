"""Allowed imports between packages. Every package lists all that it may import; the lists are not transitive.

Imports are read from the syntax tree, inside functions too, so the rules hold for lazy imports.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGES = {"specdec_fast": "specdec_fast", "specdec_kernels": "kernels/specdec_kernels"}

_VALUES = {"kernels", "kernels/unknown_names", "core", "sampling", "interfaces"}
_PARTS = _VALUES | {"trees", "adaptive", "cache", "targets", "heads", "retrieval", "draft_runners"}
_ENGINE = _PARTS | {"rules", "drafters", "engine", "extras"}
_APPLICATIONS = _ENGINE | {"loading", "tune", "lab", "train", "integrations", "front", "server"}
_APPLICATIONS |= {"embedding", "integrations/transformers", "integrations/vllm", "integrations/sglang", "lab/engines"}
MAY_IMPORT: dict[str, set[str]] = {
    # the operators: they do not import the engine, and only torch and triton from outside
    "kernels/unknown_names": set(),  # messages about names, for packages that use no operator
    # its registration with torch names the operators, lazily
    "kernels/dispatch": {"kernels", "kernels/ops", "kernels/unknown_names"},
    "kernels/triton_shared": {"kernels", "kernels/dispatch"},
    "kernels/ops": {"kernels", "kernels/dispatch", "kernels/triton_shared"},
    "kernels/testing": {"kernels", "kernels/dispatch", "kernels/ops", "kernels/triton_shared"},
    "kernels/inspection": {"kernels", "kernels/dispatch", "kernels/testing", "kernels/triton_shared"},
    "kernels/simulated_gpu": {
        "kernels",
        "kernels/triton_shared",
        "kernels/dispatch",
        "kernels/inspection",
        "kernels/ops",
        "kernels/testing",
        "kernels/unknown_names",
    },
    "kernels": {"kernels/dispatch", "kernels/ops", "kernels/unknown_names"},
    # the engine
    "extras": {"kernels/dispatch"},
    "core": {"kernels", "kernels/dispatch", "kernels/unknown_names"},
    "sampling": {"kernels", "core"},
    "interfaces": {"kernels", "core", "sampling"},
    "trees": _VALUES,
    "adaptive": _VALUES,
    "cache": _VALUES,
    "heads": {"kernels/unknown_names"},
    "retrieval": {"kernels", "kernels/dispatch", "extras"},
    "targets": _VALUES | {"cache", "kernels/dispatch", "kernels/triton_shared"},
    "draft_runners": _VALUES | {"cache", "targets", "trees"},
    "rules": _VALUES | {"adaptive"},
    "drafters": _PARTS,
    "engine": _VALUES | {"adaptive", "rules"},
    # user interfaces
    "tune": _ENGINE,
    "loading": _ENGINE | {"tune"},
    "lab": _VALUES | {"engine", "rules", "kernels/testing"},
    # its scripts run in other interpreters and take what they need of this project by name
    "lab/engines": {"lab", "kernels/unknown_names"},
    "integrations": {"extras", "kernels/unknown_names", "retrieval"},  # grammars
    # adapters to the stacks that serve models: each knows this project and one of them
    "embedding": _VALUES | {"trees", "rules"},
    "integrations/transformers": _ENGINE | {"loading"},
    "integrations/vllm": _VALUES | {"embedding", "extras", "retrieval", "drafters"},
    "integrations/sglang": _VALUES | {"embedding", "extras"},
    "train": _PARTS | {"extras", "loading", "engine"},  # engine/prompts.py: texts begin as prompts do
    "server": {"core", "sampling", "engine", "integrations", "front"},
    "front": _ENGINE | {"loading", "embedding"},  # specdec_fast/__init__.py: names only, resolved on first use
    "commands": _APPLICATIONS | {"kernels/dispatch", "kernels/inspection", "kernels/testing", "kernels/triton_shared"},
    "cli": {"commands", "core", "front"},
    "__main__": {"cli"},
}
# Packages from outside that a layer may import.
_TORCH_ONLY = {"core", "rules", "cache", "sampling", "trees", "adaptive", "interfaces", "engine"}
OUTSIDE = {layer: {"torch"} for layer in _TORCH_ONLY} | {
    layer: {"torch", "triton"} for layer in MAY_IMPORT if layer.startswith("kernels")
}


@dataclass(frozen=True)
class Import:
    """`module` imports `target` at `line`; `typing_only` is inside `if TYPE_CHECKING`."""

    module: str
    target: str
    line: int
    typing_only: bool


def modules_of(root: Path, files: Iterable[Path]) -> dict[str, Path]:
    """Dotted name -> file of every module of our packages."""
    found = {}
    for package, folder in PACKAGES.items():
        base = root / folder
        for path in files:
            if path.suffix == ".py" and base in path.parents:
                parts = [package, *path.relative_to(base).with_suffix("").parts]
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, path: Path, known: set[str]) -> Iterator[Import]:
    """Every import of a module; relative names are resolved, `from package import part` names the part."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def visit(node: ast.AST, typing_only: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno, typing_only)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*anchor, base] if base else anchor)
            for alias in node.names:
                deeper = f"{base}.{alias.name}"
                yield Import(module, deeper if deeper in known else base, node.lineno, typing_only)
        guard = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, typing_only or guard)

    yield from visit(ast.parse(path.read_text(encoding="utf-8"), str(path)), False)


def layer_of(module: str) -> str | None:
    """The layer of one of our modules; None for a module that has none."""
    package, _, rest = module.partition(".")
    part, _, below = rest.partition(".")
    if package == "specdec_kernels":
        inner = f"kernels/{part}"
        return inner if inner in MAY_IMPORT else "kernels"
    if not part:
        return "front"
    inner = f"{part}/{below.partition('.')[0]}"
    if inner in MAY_IMPORT:
        return inner
    return part if part in MAY_IMPORT else None


def violations(root: Path, files: Iterable[Path]) -> list[str]:
    """One line per import that goes against the layers."""
    known = modules_of(root, files)
    found = []
    for module, path in sorted(known.items()):
        place = path.relative_to(root)
        layer = layer_of(module)
        if layer is None:
            found.append(f"{place}: this module has no layer; name it in {Path(__file__).name}")
            continue
        for item in imports_of(module, path, set(known)):
            outer = item.target.partition(".")[0]
            if outer not in PACKAGES:
                allowed = OUTSIDE.get(layer)
                if allowed is not None and outer not in sys.stdlib_module_names and outer not in allowed:
                    found.append(f"{place}:{item.line}: {layer} imports {outer}; it may import {sorted(allowed)}")
                continue
            other = layer_of(item.target)
            if other == layer == "drafters" and len({module, item.target, "specdec_fast.drafters"}) == 3:
                found.append(f"{place}:{item.line}: drafter imports {item.target}; drafters are independent")
            elif other != layer and other not in MAY_IMPORT[layer]:
                found.append(f"{place}:{item.line}: {layer} imports {item.target}, which is above or beside it")
    return found


def cycles(root: Path, files: Iterable[Path]) -> list[str]:
    """One line per import cycle at run time (imports for type checking alone do not count)."""
    known = modules_of(root, files)
    graph = {
        module: sorted({i.target for i in imports_of(module, path, set(known)) if not i.typing_only} & set(known))
        for module, path in known.items()
    }
    state: dict[str, int] = {}
    found = []

    def visit(module: str, trail: list[str]) -> None:
        state[module] = 1
        for target in graph[module]:
            if state.get(target) == 1 and target != module:
                found.append(" -> ".join([*trail[trail.index(target) :], target]))
            elif target not in state:
                visit(target, [*trail, target])
        state[module] = 2

    for module in sorted(graph):
        if module not in state:
            visit(module, [module])
    return found


def foreign_includes(root: Path, files: Iterable[Path]) -> list[str]:
    """Kernel sources that include headers of torch or Python: only csrc/bindings sees them."""
    found = []
    for path in files:
        inside = root / "csrc" in path.parents and root / "csrc" / "bindings" not in path.parents
        if inside and path.suffix in (".h", ".cpp", ".cu", ".cuh"):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if re.match(r'\s*#\s*include\s*[<"](torch|ATen|c10|pybind11|Python\.h)', line):
                    found.append(f"{path.relative_to(root)}:{number}: {line.strip()}; take plain pointers instead")
    return found


def test_imports_follow_the_layers(root: Path, listed: Callable[[Path], list[Path]]) -> None:
    assert violations(root, listed(root)) == []


def test_there_are_no_import_cycles(root: Path, listed: Callable[[Path], list[Path]]) -> None:
    assert cycles(root, listed(root)) == []


def test_only_bindings_include_framework_headers(root: Path, listed: Callable[[Path], list[Path]]) -> None:
    assert foreign_includes(root, listed(root)) == []


def test_the_operators_are_reached_through_their_package_only(root: Path, listed: Callable[[Path], list[Path]]) -> None:
    direct = [
        str(path.relative_to(root))
        for path in listed(root)
        if root / "specdec_fast" in path.parents and path.suffix == ".py"
        if "torch.ops.specdec" in path.read_text(encoding="utf-8")
    ]
    assert direct == []


PLANTED = [
    ("kernels/specdec_kernels/ops/op/reference.py", "from specdec_fast.core.draft import Draft", "kernels/ops imports"),
    ("kernels/specdec_kernels/ops/op/reference.py", "import numpy", "kernels/ops imports numpy"),
    ("kernels/specdec_kernels/dispatch/operator.py", "from ..testing import samples", "kernels/dispatch imports"),
    ("specdec_fast/core/draft.py", "from specdec_fast.engine.engine import Engine", "core imports"),
    ("specdec_fast/core/draft.py", "def f():\n    import specdec_fast.rules", "core imports"),
    ("specdec_fast/engine/state.py", "from specdec_fast import Engine", "engine imports specdec_fast,"),
    ("specdec_fast/rules/replay.py", "from specdec_fast.targets import tiny_models", "rules imports"),
    ("specdec_fast/cache/paged.py", "from specdec_fast.targets.tiny_models import x", "cache imports"),
    ("specdec_fast/drafters/a.py", "from specdec_fast.drafters.b import x", "drafters are independent"),
    ("specdec_fast/drafters/a.py", "from . import b", "drafters are independent"),
    ("specdec_fast/drafters/a.py", "from ..rules import replay", "drafters imports"),
    ("specdec_fast/drafters/a.py", "import specdec_fast.engine.engine as e", "drafters imports"),
    ("specdec_fast/engine/engine.py", "from specdec_fast.cli import main", "engine imports"),
    ("specdec_fast/lab/report.py", "from specdec_fast.tune import x", "lab imports"),
    ("specdec_fast/integrations/a.py", "from specdec_kernels import x", "integrations imports specdec_kernels,"),
    ("specdec_fast/integrations/vllm/a.py", "import specdec_fast.engine.engine", "integrations/vllm imports"),
    ("specdec_fast/stuff/thing.py", "", "has no layer"),
]


def plant(root: Path, sources: dict[str, str]) -> list[Path]:
    """Writes files below root, with empty modules to which imports can resolve."""
    neighbours = [
        "core/draft",
        "engine/engine",
        "cli",
        "rules/replay",
        "targets/tiny_models",
        "drafters/a",
        "drafters/b",
        "tune/__init__",
        "commands/__init__",
    ]
    for name in (f"specdec_fast/{stem}.py" for stem in [*neighbours, "__init__", "drafters/__init__"]):
        sources.setdefault(name, "")
    for name, text in sources.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return sorted(root / name for name in sources)


@pytest.mark.parametrize(("place", "source", "message"), PLANTED)
def test_a_planted_import_is_caught(tmp_path: Path, place: str, source: str, message: str) -> None:
    found = violations(tmp_path, plant(tmp_path, {place: source}))
    assert len(found) == 1 and place in found[0] and message in found[0], found


def test_a_clean_tree_passes(tmp_path: Path) -> None:
    files = plant(
        tmp_path,
        {
            "specdec_fast/targets/tiny_models.py": "from specdec_fast.cache.paged import x",
            "specdec_fast/drafters/a.py": "from specdec_fast.targets import tiny_models\nimport torch",
            "specdec_fast/cli.py": "def f():\n    from specdec_fast.commands import x\nimport specdec_fast",
        },
    )
    assert violations(tmp_path, files) == [] and cycles(tmp_path, files) == []


def test_a_planted_cycle_is_caught(tmp_path: Path) -> None:
    files = plant(
        tmp_path,
        {
            "specdec_fast/engine/state.py": "from specdec_fast.sampling.params import x",
            "specdec_fast/sampling/params.py": "def f():\n    from specdec_fast.engine import state",
            "specdec_fast/engine/stats.py": "if TYPE_CHECKING:\n    from specdec_fast.engine.state import x",
        },
    )
    assert cycles(tmp_path, files) == [
        "specdec_fast.engine.state -> specdec_fast.sampling.params -> specdec_fast.engine.state"
    ]


def test_a_planted_include_is_caught(tmp_path: Path) -> None:
    for place in ("csrc/verify/rejection.h", "csrc/bindings/verify_chains.cpp"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("#include <torch/csrc/stable/library.h>\n")
    found = foreign_includes(tmp_path, sorted(tmp_path.rglob("*.*")))
    assert len(found) == 1 and "csrc/verify/rejection.h:1" in found[0]
