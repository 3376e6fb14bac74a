"""Documents name files that exist, and speak of the project alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from documents import listing
from documents.names import forbidden_words, missing_paths, missing_tests

Listed = Callable[[Path], list[Path]]
Write = Callable[[dict[str, str]], list[Path]]


def test_the_main_documents_exist(root: Path) -> None:
    expected = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "LICENSE-PSF")
    assert [name for name in expected if not (root / name).exists()] == []


def test_named_files_exist(root: Path, documents: list[Path]) -> None:
    found = missing_paths(root, documents)
    assert not found, listing(found)


def test_tests_that_modules_name_exist(root: Path, listed: Listed) -> None:
    found = missing_tests(root, listed(root))
    assert not found, listing(found)


def test_nothing_speaks_of_one_machine(root: Path, listed: Listed) -> None:
    found = forbidden_words(root, listed(root))
    assert not found, listing(found)


def test_a_planted_path_is_caught(tmp_path: Path, write: Write) -> None:
    text = (
        "See `tests/gone.py`, [this](docs/gone.md), `tests/test_<name>.py`, `tests/*.py`, "
        "`tests/here.py::test_x`, `huggingface.co/tests`.\n```bash\npytest tests/gone2.py -q\n"
        "cp tests/here.py tests/mine.py\n```\n"
    )
    (document, _) = write({"README.md": text, "tests/here.py": ""})
    assert missing_paths(tmp_path, [document]) == [
        f"README.md: {name} does not exist" for name in ("docs/gone.md", "tests/gone.py", "tests/gone2.py")
    ]


def test_a_planted_test_of_a_module_is_caught(tmp_path: Path, write: Write) -> None:
    sources = {"specdec_fast/a.py": '"""Tests: tests/test_a.py and tests/b/test_gone.py."""', "tests/test_a.py": ""}
    found = missing_tests(tmp_path, write(sources))
    assert found == ["specdec_fast/a.py: tests/b/test_gone.py does not exist"]


@pytest.mark.parametrize(
    ("name", "line", "caught"),
    [
        ("a.py", "x = '/" + "work/main'", 1),
        ("a.md", "see issue #3", 1),
        ("a.md", "this " + "session", 1),
        ("a.py", "scope='session'", 0),
        ("a.md", "https://example.org/" + "work/x", 0),
        ("a.md", "the work/root is here; $(HOME)/" + "work/x", 0),
    ],
)
def test_a_planted_word_is_caught(tmp_path: Path, write: Write, name: str, line: str, caught: int) -> None:
    assert len(forbidden_words(tmp_path, write({name: line}))) == caught
