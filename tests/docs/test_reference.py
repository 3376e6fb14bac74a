"""The generated reference has all commands, operators, rules, drafters and public names."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("griffe")

HOOKS = "reference_pages", "command_line", "operator_tables", "plugin_lists"


@pytest.fixture
def hooks(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module of docs/hooks/."""
    monkeypatch.syspath_prepend(str(root / "docs" / "hooks"))
    yield import_module
    for name in HOOKS:
        sys.modules.pop(name, None)


def reference(root: Path, hooks: Any) -> dict[str, str]:
    """The pages of the reference with their generated parts."""
    filled = hooks("reference_pages").filled
    pages = sorted((root / "docs" / "reference").glob("*.md"))
    return {page.name: filled(page.read_text(encoding="utf-8"), page.name) for page in pages}


def test_public_names_are_documented(root: Path, hooks: Any) -> None:
    import specdec_fast
    import specdec_kernels

    text = "\n".join(reference(root, hooks).values())
    documented = set(re.findall(r"^::: ([\w.]+)", text, flags=re.MULTILINE))
    last = {path.rpartition(".")[2] for path in documented}
    assert set(specdec_fast.__all__) - {"__version__"} - last == set()
    constants = {name for name in specdec_kernels.__all__ if name.isupper()}
    assert set(specdec_kernels.__all__) - constants - last == set()


def test_documented_names_exist(root: Path, hooks: Any) -> None:
    """(mkdocstrings finds names without importing, so it can document what is gone at run time.)"""
    text = "\n".join(reference(root, hooks).values())
    for path in re.findall(r"^::: ([\w.]+)", text, flags=re.MULTILINE):
        parts = path.split(".")
        for cut in range(len(parts), 0, -1):
            try:
                found = import_module(".".join(parts[:cut]))
            except ModuleNotFoundError:
                continue
            for name in parts[cut:]:
                found = getattr(found, name)
            break
        else:
            pytest.fail(f"{path} cannot be imported")


def test_all_operators_are_in_the_table(hooks: Any) -> None:
    from specdec_kernels import OPS

    table = hooks("operator_tables").overview()
    rows = {row.split("`")[1]: row for row in table.splitlines() if row.startswith("| [`")}
    ours = {name for name, operator in OPS.items() if operator.reference.__module__.startswith("specdec_kernels.")}
    assert rows.keys() == ours
    for name, row in rows.items():
        assert row.count("|") == 4, row
        assert all(f"`{backend.name}`" in row for backend in OPS[name].backends), row
    described = [row for row in rows.values() if "[M" in row or "[B" in row or "[R" in row]
    assert len(described) > len(rows) / 2, "shapes are not found in the docstrings"


def test_an_operator_without_a_family_is_an_error(hooks: Any) -> None:
    from mkdocs.exceptions import PluginError

    assert hooks("operator_tables").family_of("kv_commit") == "Key/value cache"
    with pytest.raises(PluginError, match="planted"):
        hooks("operator_tables").family_of("planted")
    with pytest.raises(PluginError, match="planted"):
        hooks("reference_pages").filled("<!-- generate: planted -->", "a.md")


def test_all_commands_are_on_the_page(root: Path, hooks: Any) -> None:
    text = hooks("command_line").reference()
    headings = re.findall(r"^#+ `(specdec.*)`$", text, flags=re.MULTILINE)
    assert {"specdec", "specdec generate", "specdec kernels inspect", "specdec tune tree"} <= set(headings)
    assert "`--max-new-tokens" in text and len(headings) == len(set(headings)) > 15


def test_all_rules_and_drafters_are_listed(hooks: Any) -> None:
    from specdec_fast.drafters import drafter_names
    from specdec_fast.rules import rule_names

    lists = hooks("plugin_lists")
    assert re.findall(r"^## `(\w+)`$", lists.rules(), flags=re.MULTILINE) == rule_names()
    assert re.findall(r"^## `(\w+)`$", lists.drafters(), flags=re.MULTILINE) == drafter_names()


def test_templates_say_where_a_checkout_has_the_text(root: Path) -> None:
    for page in sorted((root / "docs" / "reference").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if re.search(r"^(:::|<!-- generate)", text, flags=re.MULTILINE):
            assert "In a checkout, " in text, page.name


def test_colours_are_documented(root: Path) -> None:
    page = (root / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    for name in ("NO_COLOR", "FORCE_COLOR"):  # rich reads the second
        assert f"| `{name}` |" in page


def test_the_home_page_agrees_with_the_readme(root: Path) -> None:
    home, readme = ((root / name).read_text(encoding="utf-8") for name in ("docs/index.md", "README.md"))
    tables = re.findall(r"^\| (?:you need|model \|).*?\n\n", readme, flags=re.MULTILINE | re.DOTALL)
    assert len(tables) == 2
    for table in tables:
        assert table.strip() in home


def test_environment_variables_are_documented(root: Path) -> None:
    page = (root / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(SPECDEC_\w+)`", page, flags=re.MULTILINE))
    assert read_from_the_environment(root) == documented


def test_a_planted_variable_is_found(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text('a = os.environ.get("SPECDEC_A", "")\n')
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "b.cpp").write_text('getenv("SPECDEC_B");  // and not SPECDEC_C\n')
    assert read_from_the_environment(tmp_path) == {"SPECDEC_A", "SPECDEC_B"}


def read_from_the_environment(root: Path) -> set[str]:
    """Variables of the project that its sources, tests and benchmarks read."""
    sources = [root / "setup.py"]
    for folder in ("specdec_fast", "kernels", "csrc", "benchmarks", "tests"):
        files = (path for path in (root / folder).rglob("*") if path.suffix in (".py", ".cpp", ".h"))
        sources += [path for path in files if root / "tests" / "docs" not in path.parents]
    pattern = re.compile(r"(?:environ\.get\(|environ\[|getenv\(|envvar=)\"(SPECDEC_[A-Z_]+)\"")
    return {name for path in sources for name in pattern.findall(path.read_text(encoding="utf-8"))}
