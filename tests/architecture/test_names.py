"""Names: one word per thing, no `utils` modules, and a test and a benchmark for every part."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

DRAWERS = {"util", "utils", "common", "helper", "helpers", "misc"}
NOT_USED = ("candidate", "posterior", "retrieve_indices", "verified_id")
SOURCE = (".py", ".cpp", ".h", ".cu", ".cuh")
KERNELS = "kernels/specdec_kernels/ops"
MEASURED = "benchmarks/drafters.py"
RESULTS = "benchmarks/results/drafters_cpu.json"

Listed = Callable[[Path], list[Path]]


def drawers(root: Path, files: Iterable[Path]) -> list[str]:
    """Modules and folders with empty names such as `utils`."""
    found = []
    for path in files:
        place = path.relative_to(root)
        if path.suffix in SOURCE and DRAWERS & {place.stem, *place.parts[:-1]}:
            found.append(f"{place}: name it after what it is responsible for")
    return found


def defined_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that a Python module defines (not those that it uses from elsewhere)."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr, node.lineno


def words_not_used(root: Path, files: Iterable[Path]) -> list[str]:
    """Identifiers that contain a word for which the project has another."""
    banned = re.compile("|".join(NOT_USED), re.IGNORECASE)
    found = []
    for path in files:
        if path.suffix not in SOURCE:
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            names = list(defined_names(ast.parse(text, str(path))))
        else:
            code = re.sub(r'//[^\n]*|"(?:\\.|[^"\\\n])*"', "", text)
            code = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), code, flags=re.DOTALL)
            names = [(m[0], code.count("\n", 0, m.start()) + 1) for m in re.finditer(r"[A-Za-z_]\w*", code)]
        found += [f"{path.relative_to(root)}:{line}: {name}" for name, line in names if banned.search(name)]
    return found


def operators(root: Path, files: Iterable[Path]) -> set[str]:
    """Names of the operator folders."""
    base = root / KERNELS
    inside = (path.relative_to(base) for path in files if base in path.parents and path.suffix == ".py")
    folders = {path.parts[0] for path in inside if len(path.parts) > 1 and not path.parts[0].startswith("_")}
    return folders


def measured_drafters(path: Path) -> dict[str, ast.Call]:
    """The entries of the benchmark's METHODS by title: `METHODS = {"a title": Method("name", ...), ...}`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if any(getattr(each, "id", None) == "METHODS" for each in targets) and isinstance(value, ast.Dict):
            entries = zip(map(_text, value.keys), value.values)
            return {title: entry for title, entry in entries if isinstance(entry, ast.Call) and _name_of(entry)}
    return {}


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _name_of(method: ast.Call) -> str:
    return _text(method.args[0]) if method.args else ""


def recorded_drafters(path: Path, methods: dict[str, ast.Call]) -> set[str]:
    """Drafters with a row in the committed results, where methods have titles."""
    titles = {row["drafter"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    return {_name_of(method) for title, method in methods.items() if title in titles}


def without_head(name: str, methods: Iterable[ast.Call], present: set[str]) -> bool:
    """Whether the benchmark can measure a drafter only with the user's head, since none is bundled."""
    own = [{word.arg for word in method.keywords} for method in methods if _name_of(method) == name]
    return all("own_head" in words for words in own) and f"specdec_fast/assets/demo-{name}/config.json" not in present


def incomplete_parts(root: Path, files: Iterable[Path]) -> list[str]:
    """Operators, drafters and rules that lack their reference, their test or their benchmark."""
    present = {str(path.relative_to(root)) for path in files}
    benchmarks = "\n".join(
        path.read_text(encoding="utf-8")
        for path in files
        if root / "benchmarks" in path.parents and path.suffix == ".py"
    )
    methods = measured_drafters(root / MEASURED) if MEASURED in present else {}
    measured = {_name_of(method) for method in methods.values()}
    recorded = recorded_drafters(root / RESULTS, methods) if RESULTS in present else set()
    headless = {name for name in measured if without_head(name, methods.values(), present)}
    found: list[str] = []

    def expect(name: str, *needed: str) -> None:
        found.extend(f"{name}: {place} is missing" for place in needed if place not in present)

    for op in sorted(operators(root, files)):
        expect(op, f"{KERNELS}/{op}/__init__.py", f"{KERNELS}/{op}/reference.py", f"tests/kernels/test_{op}.py")
        if not re.search(rf"(?<![a-z]){op}(?![a-z])", benchmarks):
            found.append(f"{op}: no benchmark under benchmarks/ mentions it")
    for kind in ("drafters", "rules"):
        for place in sorted(present):
            match = re.fullmatch(rf"specdec_fast/{kind}/([a-z]\w*)\.py", place)
            if match:
                expect(match[1], f"tests/{kind}/test_{match[1]}.py")
                if kind == "drafters" and match[1] not in measured:
                    found.append(f"{match[1]}: no entry in METHODS of {MEASURED}")
                elif kind == "drafters" and match[1] not in recorded | headless:
                    found.append(f"{match[1]}: no row in {RESULTS}")
    return found


def test_no_module_has_an_empty_name(root: Path, listed: Listed) -> None:
    assert drawers(root, listed(root)) == []


def test_words_with_a_better_name_are_not_used(root: Path, listed: Listed) -> None:
    assert words_not_used(root, listed(root)) == []


def test_every_part_has_its_reference_test_and_benchmark(root: Path, listed: Listed) -> None:
    assert incomplete_parts(root, listed(root)) == []


def plant(root: Path, sources: dict[str, str]) -> list[Path]:
    for name, text in sources.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return sorted(root / name for name in sources)


@pytest.mark.parametrize("place", ["specdec_fast/utils.py", "csrc/common/loop.h", "tests/helpers.py"])
def test_a_planted_empty_name_is_caught(tmp_path: Path, place: str) -> None:
    assert len(drawers(tmp_path, plant(tmp_path, {place: "", "specdec_fast/commons.py": ""}))) == 1


@pytest.mark.parametrize(
    ("place", "source", "caught"),
    [
        ("a.py", "def f(candidates): pass", 1),
        ("a.py", "class Posterior: pass", 1),
        ("a.py", "self.retrieve_indices = 1", 1),
        ("a.py", "x = other.candidate_generator('candidate')  # candidate", 0),
        ("a.cpp", "int n_candidates = 0;", 1),
        ("a.cpp", '// candidate\nconst char* a = "candidate"; /* verified_id\n */', 0),
        ("a.md", "candidate", 0),
    ],
)
def test_a_planted_word_is_caught(tmp_path: Path, place: str, source: str, caught: int) -> None:
    assert len(words_not_used(tmp_path, plant(tmp_path, {place: source}))) == caught


def test_planted_incomplete_parts_are_caught(tmp_path: Path) -> None:
    sources = {
        f"{KERNELS}/done/__init__.py": "",
        f"{KERNELS}/done/reference.py": "",
        "tests/kernels/test_done.py": "",
        "benchmarks/kernels/bench_all.py": "done, new = 1, 2",
        MEASURED: 'new = 1\nMETHODS: dict[str, Method] = {"one": Method("drafty", "new"), "new": Method("drafty"), '
        '"two": Method("headed", own_head=True)}\n',
        RESULTS: '{"rows": [{"drafter": "one"}]}',
        "specdec_fast/drafters/drafty.py": "",
        "specdec_fast/drafters/headed.py": "",
        "specdec_fast/drafters/__init__.py": "",
        "specdec_fast/rules/__init__.py": "",
        "tests/drafters/test_drafty.py": "",
        "tests/drafters/test_headed.py": "",
    }
    assert incomplete_parts(tmp_path, plant(tmp_path, sources)) == []
    head = {"specdec_fast/assets/demo-headed/config.json": ""}
    missing = plant(tmp_path, sources | head | {RESULTS: '{"rows": [{"drafter": "three"}]}'})
    assert incomplete_parts(tmp_path, missing) == [
        "drafty: no row in benchmarks/results/drafters_cpu.json",
        "headed: no row in benchmarks/results/drafters_cpu.json",
    ]
    lonely = {
        f"{KERNELS}/raw/__init__.py": "",
        "specdec_fast/drafters/new.py": "",
        "specdec_fast/rules/odd.py": "",
    }
    assert incomplete_parts(tmp_path, plant(tmp_path, sources | lonely)) == [
        f"raw: {KERNELS}/raw/reference.py is missing",
        "raw: tests/kernels/test_raw.py is missing",
        "raw: no benchmark under benchmarks/ mentions it",
        "new: tests/drafters/test_new.py is missing",
        "new: no entry in METHODS of benchmarks/drafters.py",
        "odd: tests/rules/test_odd.py is missing",
    ]
