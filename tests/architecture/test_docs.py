"""The documents tell the truth: files and commands exist, programs run, measured numbers are recorded ones.

A table of measured numbers (in MEASURED) follows a line `<!-- results: benchmarks/results/x.json -->`; every number
with a decimal point in it must be a number of that file, at the precision that is printed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

MEASURED = "README.md", "docs/measurements.md"
DOCUMENTS = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/drafters.md",
    "docs/losslessness.md",
    "docs/measurements.md",
    "docs/training.md",
    "kernels/README.md",
)
WORDS = re.compile(r"\bissue\s+#?\d|\bsession\b", re.IGNORECASE)
MACHINE_PATHS = re.compile(r"(?<![\w.})])/(?:work|root|home)/")
# A path from the root: folders, or a file with a suffix that we use. Globs and <placeholders> are not claims.
PATH = re.compile(r"(?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|md|toml|json|h|cpp|cu|txt|yml)")
OUR_PLACES = "specdec_fast", "kernels", "csrc", "tests", "benchmarks", "examples", "requirements", "docs", ".ci"

TEXTS = {".py", ".md", ".toml", ".txt", ".cpp", ".h"}

Listed = Callable[[Path], list[Path]]


def fences(text: str) -> Iterator[tuple[str, str, int]]:
    """(language, source, line) of every fenced block, those in lists too."""
    for match in re.finditer(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE):
        yield match[1], dedent(match[2]), text.count("\n", 0, match.start()) + 1


def named_paths(text: str) -> Iterator[str]:
    """Paths of ours that a document names in code spans, links and shell blocks."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", prose)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", prose) if "://" not in link]
    shell = [source for language, source, _ in fences(text) if language in ("bash", "sh", "console", "text")]
    for piece in [*spans, *links, *shell]:
        for word in re.split(r"[\s,;:()'\"=|]+|::", piece):
            if re.search(r"[<>*{}$]", word) or not PATH.fullmatch(word):
                continue
            if word.partition("/")[0] in OUR_PLACES or (word in links and "/" not in word):
                yield word


def missing_paths(root: Path, documents: Iterable[Path]) -> list[str]:
    """Files and folders that a document names and that are not there."""
    return [
        f"{document.relative_to(root)}: {name} does not exist"
        for document in documents
        for name in sorted(set(named_paths(document.read_text(encoding="utf-8"))))
        if not (root / name).exists() and not (document.parent / name).exists()
    ]


def missing_tests(root: Path, files: Iterable[Path]) -> list[str]:
    """Files of tests that a module names and that are not there."""
    found = []
    for path in files:
        place = path.relative_to(root)
        if place.parts[0] in ("specdec_fast", "kernels", "csrc") and path.suffix in (".py", ".cpp", ".h"):
            names = sorted(set(re.findall(r"tests/[\w/]+\.py", path.read_text(encoding="utf-8"))))
            found += [f"{place}: {name} does not exist" for name in names if not (root / name).exists()]
    return found


def make_targets(root: Path) -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (root / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def subcommands() -> set[str]:
    """Names that the `specdec` program answers to."""
    import typer

    from specdec_fast.cli import main

    return set(typer.main.get_command(main).list_commands(None))


def wrong_commands(root: Path, documents: Iterable[Path], verbs: set[str]) -> list[str]:
    """`make x` and `specdec x` in code that no Makefile target and no subcommand answers to."""
    targets = make_targets(root)
    found = []
    for document in documents:
        text = document.read_text(encoding="utf-8")
        code = [source for language, source, _ in fences(text) if language in ("bash", "sh", "console")]
        code += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
        for name in re.findall(r"(?:^|[\n$;&] *)make ([a-z][\w-]*)", "\n".join(code)):
            if name not in targets:
                found.append(f"{document.relative_to(root)}: make {name}: no such target")
        for name in re.findall(r"(?:^|[\n$;&/] *)specdec ([a-z]+)", "\n".join(code)):
            if name not in verbs:
                known = ", ".join(sorted(verbs))
                found.append(f"{document.relative_to(root)}: specdec {name}: no such command; there are {known}")
    return found


def told_to_specdec(source: str) -> Iterator[list[str]]:
    """The arguments of every call of the program in a shell block, by its name or as a module."""
    for line in source.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|\|", line.strip().removeprefix("$ ")):
            words = shlex.split(part, comments=True)
            if "specdec_fast.cli" in words:
                yield words[words.index("specdec_fast.cli") + 1 :]
            elif words and words[0] == "specdec":
                yield words[1:]


def read_by_specdec(arguments: Sequence[str]) -> str | None:
    """What the program says against a command line, which it reads and does not run; None: nothing."""
    import typer

    from specdec_fast.cli import main

    command: Any = typer.main.get_command(main)
    name, words, context = "specdec", list(arguments), None
    try:
        while True:
            context = command.make_context(name, words, parent=context)
            command = context.command  # a mounted application stands behind its name
            if not hasattr(command, "resolve_command"):
                return None
            name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
    except Exception as error:
        return getattr(error, "message", None) or f"{type(error).__name__} {error}"


def misused_commands(root: Path, documents: Iterable[Path]) -> list[str]:
    """Calls of the program in shell blocks with a command, an option or a value that it does not have."""
    found = []
    for document in documents:
        for language, source, line in fences(document.read_text(encoding="utf-8")):
            for words in told_to_specdec(source) if language in ("bash", "sh", "console") else ():
                reason = read_by_specdec(words)
                if reason is not None:
                    place = f"{document.relative_to(root)}:{line}"
                    found.append(f"{place}: specdec {shlex.join(words)}: {reason}")
    return found


def broken_programs(root: Path, documents: Iterable[Path]) -> list[str]:
    """Python blocks that do not compile."""
    found = []
    for document in documents:
        for language, source, line in fences(document.read_text(encoding="utf-8")):
            if language in ("python", "py"):
                try:
                    compile(source, f"{document.name}:{line}", "exec")
                except SyntaxError as error:
                    found.append(f"{document.relative_to(root)}:{line}: {error}")
    return found


def numbers_in(value: object) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers_in(each)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)


def unsupported_numbers(root: Path, document: Path) -> list[str]:
    """Decimal numbers of tables that no recorded result supports."""
    found = []
    source: str | None = None
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        marker = re.fullmatch(r"<!-- results: (\S+) -->", line.strip())
        if marker:
            source = marker[1]
        elif line.lstrip().startswith("|"):
            printed = re.findall(r"(?<![\w.])\d[\d,]*\.\d+(?![\w.])", re.sub(r"`[^`]*`", "", line))
            if printed and source is None:
                found.append(f"{document.name}:{number}: {printed[0]} has no results marker above its table")
            elif printed and not (root / source).exists():  # type: ignore[operator]
                found.append(f"{document.name}:{number}: {source} does not exist")
            elif printed:
                recorded = list(numbers_in(json.loads((root / source).read_text(encoding="utf-8"))))  # type: ignore[operator]
                for text in printed:
                    digits = len(text.partition(".")[2])
                    if not any(f"{value:.{digits}f}" == text.replace(",", "") for value in recorded):
                        found.append(f"{document.name}:{number}: {text} is not in {source}")
        elif line.strip():
            source = None
    return found


def forbidden_words(root: Path, files: Iterable[Path]) -> list[str]:
    """Paths of one machine anywhere, and in documents words that mean nothing to a reader of the project."""
    found = []
    for path in files:
        place = str(path.relative_to(root))
        if place == "tests/architecture/test_docs.py" or path.suffix not in TEXTS:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE_PATHS.search(line) or (path.suffix == ".md" and WORDS.search(line)):
                found.append(f"{place}:{number}: {line.strip()}")
    return found


@pytest.fixture
def documents(root: Path) -> list[Path]:
    return [root / name for name in DOCUMENTS]


def test_the_main_documents_exist(root: Path) -> None:
    expected = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "LICENSE-PSF")
    assert [name for name in expected if not (root / name).exists()] == []


def test_named_files_exist(root: Path, documents: list[Path]) -> None:
    assert missing_paths(root, documents) == []


def test_tests_that_modules_name_exist(root: Path, listed: Listed) -> None:
    assert missing_tests(root, listed(root)) == []


def test_named_commands_exist(root: Path, documents: list[Path]) -> None:
    assert wrong_commands(root, documents, subcommands()) == []


def test_commands_are_understood(root: Path, documents: list[Path]) -> None:
    assert misused_commands(root, documents) == []
    shell = [source for document in documents for _, source, _ in fences(document.read_text(encoding="utf-8"))]
    assert len([words for source in shell for words in told_to_specdec(source)]) > 15, "they are not found"


def test_programs_compile(root: Path, documents: list[Path]) -> None:
    assert broken_programs(root, documents) == []


@pytest.mark.parametrize("name", MEASURED)
def test_measured_numbers_are_recorded(root: Path, name: str) -> None:
    assert unsupported_numbers(root, root / name) == []
    assert "<!-- results: " in (root / name).read_text(encoding="utf-8"), "its tables are not found"


def test_nothing_speaks_of_one_machine(root: Path, listed: Listed) -> None:
    assert forbidden_words(root, listed(root)) == []


def test_the_programs_of_the_documents_run(root: Path, tmp_path: Path) -> None:
    """All but those marked `no-run` (they need a download), one after the other in one process."""
    lines = []
    for name in ("README.md", "docs/losslessness.md"):
        text = (root / name).read_text(encoding="utf-8")
        programs = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
        assert programs, name
        lines += [f"exec(compile({program!r}, {name!r}, 'exec'), {{}})" for program in programs]
    source = "\n".join(lines)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "error::UserWarning:specdec_kernels", "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and "tokens per target pass" in done.stdout, done.stderr
    judged = re.findall(r"^context 0, .*: p = (\d\.\d+)$", done.stdout, flags=re.MULTILINE)
    assert judged and min(map(float, judged)) > 0.001


def test_the_examples_of_contributing_work(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter and the rule decode like no drafter, the drafter's test passes, the operator picks its backend."""
    import torch
    from oracles.automaton import AutomatonTarget, random_logits

    from specdec_fast import Engine, SamplingParams
    from specdec_kernels import OPS, use_backend

    scope: dict[str, Any] = {}
    for language, source, line in fences((root / "CONTRIBUTING.md").read_text(encoding="utf-8")):
        if language == "python":
            exec(compile(source, f"CONTRIBUTING.md:{line}", "exec", dont_inherit=True), scope)
            monkeypatch.setitem(sys.modules, "specdec_fast.drafters.stutter", SimpleNamespace(**scope))
    scope["test_a_run_of_equal_tokens_is_drafted"]()
    params = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    texts = []
    for drafter, rule in (
        (None, "replay"),
        (scope["DRAFTER"](), "replay"),
        (scope["DRAFTER"](), scope["RULE"]),
    ):
        engine = Engine(AutomatonTarget(random_logits(5, 7)), drafter, rule=rule)
        texts.append([handle.tokens for handle in engine.generate([[1, 2], [3]], params)])
    assert len(texts[0][0]) == 12 and texts == [texts[0]] * 3
    try:
        x, scaled = torch.ones(2), scope["scaled"]
        with use_backend():
            assert scaled.choose(x, 2) == "doubling" and scaled.choose(x, 3) == "reference"
        with use_backend(example_scaled="reference"):
            assert scaled(x, 2).tolist() == [2, 2]
    finally:
        OPS.pop("example_scaled", None)


def test_the_first_program_is_the_example(root: Path) -> None:
    blocks = fences((root / "README.md").read_text(encoding="utf-8"))
    program = next(source for language, source, _ in blocks if language == "python")
    assert program.strip() in (root / "examples" / "generate.py").read_text(encoding="utf-8")


def write(root: Path, sources: dict[str, str]) -> list[Path]:
    for name, text in sources.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return [root / name for name in sources]


def test_a_planted_path_is_caught(tmp_path: Path) -> None:
    text = (
        "See `tests/gone.py`, [this](docs/gone.md), `tests/test_<name>.py`, `tests/*.py`, "
        "`tests/here.py::test_x`, `huggingface.co/tests`.\n```bash\npytest tests/gone2.py -q\n```\n"
    )
    (document, _) = write(tmp_path, {"README.md": text, "tests/here.py": ""})
    assert missing_paths(tmp_path, [document]) == [
        f"README.md: {name} does not exist" for name in ("docs/gone.md", "tests/gone.py", "tests/gone2.py")
    ]


def test_a_planted_test_of_a_module_is_caught(tmp_path: Path) -> None:
    sources = {"specdec_fast/a.py": '"""Tests: tests/test_a.py and tests/b/test_gone.py."""', "tests/test_a.py": ""}
    found = missing_tests(tmp_path, write(tmp_path, sources))
    assert found == ["specdec_fast/a.py: tests/b/test_gone.py does not exist"]


def test_a_planted_command_is_caught(tmp_path: Path) -> None:
    text = "`make test`, `make coffee`\n```bash\n$ make demo\nspecdec demo && specdec bench\nspecdec brew\n```\n"
    document, _ = write(tmp_path, {"README.md": text, "Makefile": "demo: x\ntest:\n"})
    found = wrong_commands(tmp_path, [document], {"demo", "bench"})
    assert [line.split(":")[1].strip() for line in found] == ["make coffee", "specdec brew"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("specdec tune trees", "No such command 'trees'"),
        ("specdec train medusa a.txt --step 3  # fine otherwise", "No such option: --step"),
        ("$ specdec generate hello --temperature \\\n  warm", "valid number"),
        ("accelerate launch -m specdec_fast.cli train medusa --hedas 3", "No such option: --hedas"),
        ("specdec tune head-layers", "Missing parameter: head"),
        ("specdec demo && specdec tune tree --nodes 3 | head", None),
    ],
)
def test_a_planted_option_is_caught(tmp_path: Path, line: str, reason: str | None) -> None:
    (document,) = write(tmp_path, {"README.md": f"1. text\n   ```bash\n   {line}\n   ```\n"})
    found = misused_commands(tmp_path, [document])
    assert len(found) == (reason is not None) and all(reason in each for each in found if reason)


def test_a_planted_program_is_caught(tmp_path: Path) -> None:
    (document,) = write(tmp_path, {"README.md": "```python\nx = 1\n```\n\n```python\ndef f(:\n```\n"})
    assert len(broken_programs(tmp_path, [document])) == 1


def test_a_planted_number_is_caught(tmp_path: Path) -> None:
    text = (
        "| a |\n| --- |\n| 9.99 ms |\n\ntext\n\n<!-- results: r.json -->\n| b |\n| 1.23 |\n"
        "| 1.24 ms, `0.1.0`, 2.13.0 |\n\ntext\n<!-- results: gone.json -->\n| 3.5 |\n"
    )
    document, _ = write(tmp_path, {"README.md": text, "r.json": json.dumps({"rows": [{"seconds": 1.2312}]})})
    assert unsupported_numbers(tmp_path, document) == [
        "README.md:3: 9.99 has no results marker above its table",
        "README.md:10: 1.24 is not in r.json",
        "README.md:14: gone.json does not exist",
    ]


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
def test_a_planted_word_is_caught(tmp_path: Path, name: str, line: str, caught: int) -> None:
    assert len(forbidden_words(tmp_path, write(tmp_path, {name: line}))) == caught
