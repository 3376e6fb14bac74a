"""The cost of imports and the modules that they load, measured in fresh interpreters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HEAVY = ("triton", "transformers", "specdec_kernels._C", "typer", "rich", "matplotlib", "numba", "scipy")
SECONDS = 0.3  # processor time, so that other load has little effect; idle machines take a third of it
STANDARD = (  # a slow machine may take longer, in proportion to these
    "import asyncio.subprocess, csv, email.mime.text, ftplib, http.server, imaplib, logging.config, "
    "multiprocessing.managers, optparse, pydoc, smtplib, tarfile, unittest.mock, wsgiref.simple_server, "
    "xml.dom.minidom, xmlrpc.client, zipfile"
)
TIMES = 4

PROBE = """
import json, sys, time
{prelude}
found = []
for statement in {statements!r}:
    known, started = set(sys.modules), time.process_time()
    exec(statement)
    found.append((time.process_time() - started, sorted(set(sys.modules) - known)))
print(json.dumps(found))
"""


def probe(*statements: str, prelude: str = "import torch", cwd: Path) -> list[tuple[float, list[str]]]:
    """(seconds, newly loaded modules) of each statement, all in one fresh interpreter."""
    source = PROBE.format(statements=statements, prelude=prelude)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=cwd, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def heavy(modules: list[str]) -> list[str]:
    return [name for name in modules if any(name == each or name.startswith(f"{each}.") for each in HEAVY)]


def test_programs_of_make_keep_byte_code(root: Path) -> None:
    """Even if the environment forbids it: compiling torch and transformers again doubles the time of a start."""
    shown = ["make", "-s", "--eval", 'shown: ; @echo "[$$PYTHONDONTWRITEBYTECODE]"', "shown"]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(shown, capture_output=True, text=True, cwd=root, env=environment, check=True)
    assert done.stdout == "[]\n"


def test_imports_are_light_and_quick(tmp_path: Path) -> None:
    statements = "import specdec_fast", "from specdec_fast import Draft, Engine, SamplingParams, get_rule; get_rule()"
    for _ in range(3):
        standard, names, engine = probe(STANDARD, *statements, cwd=tmp_path)
        if (seconds := names[0] + engine[0]) < max(SECONDS, TIMES * standard[0]):
            break
    else:
        pytest.fail(f"importing the engine took {seconds:.2f} s, STANDARD {standard[0]:.2f} s")
    assert heavy(names[1]) == []
    assert "specdec_fast.engine.engine" in engine[1] and "specdec_kernels" in engine[1]
    assert heavy(engine[1]) == []


def test_a_heavy_import_is_caught(tmp_path: Path) -> None:
    for name, text in (
        ("eager.py", "import triton.language\n"),
        ("triton/__init__.py", ""),
        ("triton/language.py", ""),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    ((_, modules),) = probe("import eager", prelude=f"sys.path.insert(0, {str(tmp_path)!r})", cwd=tmp_path)
    assert heavy(modules) == ["triton", "triton.language"]


def kernels_packages(root: Path, files: list[Path]) -> list[str]:
    """Returns an __init__.py that would turn our folder into a package called `kernels`."""
    return [str(path.relative_to(root)) for path in files if path == root / "kernels" / "__init__.py"]


def test_our_folder_is_not_a_package_called_kernels(root: Path, listed: Callable[[Path], list[Path]]) -> None:
    assert kernels_packages(root, listed(root)) == []


def test_a_planted_package_is_caught(tmp_path: Path) -> None:
    assert kernels_packages(tmp_path, [tmp_path / "kernels" / "__init__.py"]) == ["kernels/__init__.py"]


FIND = "import importlib.util as u; s = u.find_spec('kernels'); print('found', s and s.origin)"


def test_kernels_does_not_resolve_to_our_tree(tmp_path: Path) -> None:
    """`kernels` is another project's package, so an installed specdec-fast must not provide that name."""
    done = subprocess.run([sys.executable, "-c", FIND], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "specdec" not in done.stdout.replace("specdec-fast/.venv", "")


def test_a_real_kernels_package_is_found_even_from_our_root(tmp_path: Path, root: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    source = f"import sys; sys.path.append({str(tmp_path)!r}); {FIND}"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == f"found {tmp_path / 'kernels' / '__init__.py'}"
