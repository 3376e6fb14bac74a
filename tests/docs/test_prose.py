"""The prose linter finds planted sentences in documents, and planted words in comments of code, at their lines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("proselint")

Findings = Callable[..., list[str]]
LONG = " ".join(f"w{number}" for number in range(31))
SHORT = " ".join(f"w{number}" for number in range(30))


@pytest.fixture
def findings(root: Path, monkeypatch: pytest.MonkeyPatch) -> Findings:
    """Findings of a text, without the name of the document."""
    monkeypatch.syspath_prepend(str(root / "docs" / "style"))
    import prose

    return lambda text, name="a.md": [each.removeprefix(f"{name}:") for each in prose.findings(name, text)]


@pytest.mark.parametrize(
    ("text", "line", "check"),
    [
        (f"# Title\n\n{LONG}.", 3, "long_sentences"),
        (f"- item\n- {LONG}", 2, "long_sentences"),
        (f"Runs are ... short, cf. Chen et al. 2023, {SHORT}", 1, "long_sentences"),
        (f"| a | b |\n| --- | --- |\n| c | {LONG} |", 3, "long_sentences"),
        ("A sentence. Then one, e.g. `a b`, of\n" + SHORT + ".", 1, "long_sentences"),
        ("Text.\n\n> Whoever calls it pays.", 3, "plain"),
        ("The overlay lies over the rows.", 1, "plain"),
        ("The rule answers with a path.", 1, "plain"),
        ("The drafter hears of it.", 1, "plain"),
        ("It is told the seed.", 1, "plain"),
        ("The target's law is kept.", 1, "words"),
        ("It draws\na coin for each.", 2, "words"),
        ("Scouts are scored.", 1, "words"),
        ("The taps of a layer.", 1, "words"),
        ("Four seams.", 1, "words"),
        ("Text. Of requests that wait, the first runs.", 1, "constructions"),
        ("- Of drafts which fit, one is taken.", 1, "constructions"),
        ("Text.\n\nOf `a` and `b` one is taken.", 3, "constructions"),
        ("It does not wait, nor does it poll.", 1, "constructions"),
        ("It is the size of what is kept.", 1, "constructions"),
        ("Rows are freed when they are waited for.", 1, "constructions"),
        ("The the engine.", 1, "repeated_words"),
        ("At the end of the day it runs.", 1, "cliches"),
    ],
)
def test_a_planted_sentence_is_found(findings: Findings, text: str, line: int, check: str) -> None:
    (found,) = findings(text)
    assert found.startswith(f"{line}: ") and f"{check}" in found.rpartition("[")[2]


@pytest.mark.parametrize(
    "text",
    [
        f"# {SHORT}\n\n{SHORT}.\n{SHORT}.\n\n- {SHORT}\n- {SHORT}\n\n| {SHORT} | {SHORT} |\n",
        f"`law` and ``a `coin` ``.\n\n```python\nlaw = 'whoever' # {LONG}\n```\n",
        f"    ```text\n    {LONG} law\n    ```\n",
        "[a flaw](law.md#coin) <https://a.b/law> ![x](seam.svg)",
        f"---\ntitle: law {LONG}\n---\n<!-- law {LONG} -->\n",
        "::: package.law\n    options:\n      law: coin\n\nText.",
        "Sizes of 1 1 and `a` `a`.\n\n## Heads\n\nHeads are trained.",
        "Lawful lanes of a vector, a race condition, room for one page and a therefore. Of course.",
        "Text of Chen et al. 2023. It stands in for a layer.",
    ],
)
def test_code_and_plain_sentences_are_left_alone(findings: Findings, text: str) -> None:
    assert findings(text) == []


def test_the_glossary_names_other_words(findings: Findings) -> None:
    assert findings("A coin.", "docs/glossary.md") == [] and len(findings("A coin.", "docs/guides/a.md")) == 1


def test_the_program_reports_lines_and_fails(root: Path, tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    command = [sys.executable, str(root / "docs" / "style" / "prose.py"), str(document)]
    document.write_text("Plain text.\n\nThe law.\n")
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()) == (
        1,
        [f"{document}:3: 'law': write a distribution [specdec.words]"],
    )
    document.write_text("Plain text.\n")
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture
def code_findings(root: Path, monkeypatch: pytest.MonkeyPatch) -> Findings:
    """Findings of a source text, without the name of the file."""
    monkeypatch.syspath_prepend(str(root / "docs" / "style"))
    import code_prose

    return lambda name, text: [each.removeprefix(f"{name}:") for each in code_prose.findings(name, text)]


@pytest.mark.parametrize(
    ("name", "text", "line", "word"),
    [
        ("specdec_fast/a.py", '"""A module.\n\nIt keeps the law.\n"""\n', 3, "law"),
        ("specdec_fast/a.py", "x = 1\ny = 2  # a coin for each\n", 2, "coin"),
        ("kernels/a.py", 'class A:\n    """Text."""\n\n    x: int = 0\n    """Told by others."""\n', 5, "Told"),
        ("tests/a.py", 'def f():\n    """Lawful draws."""\n', 2, "Lawful"),
        ("benchmarks/a.py", "def f():\n    # the stand-in\n    return 1\n", 2, "stand-in"),
        ("csrc/a.h", "int a = 1'000;  // one seam, and an int's other\n", 1, "seam"),
        ("csrc/a.cpp", 'auto a = "//";\n/* first\n   whoever calls */\n', 3, "whoever"),
        ("csrc/a.cu", "// scouts\n", 1, "scouts"),
        ("benchmarks/a.sh", "#!/bin/bash\necho $#  # a riddle\n", 2, "riddle"),
    ],
)
def test_a_planted_word_in_code_is_found(code_findings: Findings, name: str, text: str, line: int, word: str) -> None:
    (found,) = code_findings(name, text)
    assert found.startswith(f"{line}: '{word}': write ") and found.endswith("[specdec.code_words]")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("specdec_fast/a.py", 'law = "whoever"  # `coin`, law_stats, lawn, flaw and unlawfulness\n'),
        ("specdec_fast/a.py", 'TABLE = {"Laws": "TokenDistributions"}\nprint("told", """\nthe law\n""")\n'),
        ("tests/a.py", '"""A data race, a data\nrace, race conditions, and twins that cannot be told apart."""\n'),
        ("csrc/a.h", "int law = 2; char coin[] = \"// the law\"; char c = '\\''; char d = 'x'; int seam = 1'000;\n"),
        ("benchmarks/a.sh", "law=1\necho ${law#coin}\n"),
    ],
)
def test_identifiers_strings_and_allowed_phrases_are_left_alone(code_findings: Findings, name: str, text: str) -> None:
    assert code_findings(name, text) == []


def test_code_of_the_product_and_its_tests_is_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(root / "docs" / "style"))
    import code_prose
    import prose

    names = set(prose.code())
    assert {"specdec_fast/__init__.py", "csrc/random.h", "tests/docs/test_prose.py", "setup.py"} <= names
    assert {name.partition("/")[0] for name in names} >= {"specdec_fast", "kernels", "csrc", "benchmarks", "tests"}
    assert not any(name.endswith(".md") for name in names)
    assert all(reason for reason in code_prose.ALLOWED.values())


def test_the_program_lints_code_too(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "a.py"
    source.write_text('"""Text."""\n\nx = 1  # the law\n')
    command = [sys.executable, str(root / "docs" / "style" / "prose.py"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    expected = f"{source}:3: 'law': write a distribution [specdec.code_words]"
    assert (done.returncode, done.stdout.splitlines()) == (1, [expected])


def test_all_documents_are_read(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(root / "docs" / "style"))
    import prose

    names = set(prose.documents())
    assert {"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/glossary.md"} <= names
    assert "CHANGELOG.md" not in names and any(name.startswith("docs/decisions/") for name in names)
    for name in ("README.md", "docs/a.md", "CHANGELOG.md", ".venv/b.md", "build/c.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert prose.documents(tmp_path) == ["README.md", "docs/a.md"], "without git"
