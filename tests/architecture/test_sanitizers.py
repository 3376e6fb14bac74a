"""The plain C++ of all operators under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

# Not optimised: compiling takes longer than running.
FLAGS = [
    "-O0",
    "-g1",
    "-std=c++20",
    "-ffp-contract=off",
    "-Wno-psabi",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
]
APART = ("bindings",)  # needs torch
CASES = 40


def compiler() -> str | None:
    """Returns a compiler that links a sanitized program."""
    found = shutil.which(os.environ.get("CXX", "c++"))
    if found is None:
        return None
    probe = [found, "-fsanitize=address,undefined", "-x", "c++", "-", "-o", os.devnull]
    done = subprocess.run(probe, input="int main() {}", capture_output=True, text=True)
    return found if done.returncode == 0 else None


def ninja_file(root: Path, cxx: str) -> str:
    """Returns a ninja file with one object per source; ninja keeps them between runs."""
    sources = sorted(path for path in (root / "csrc").rglob("*.cpp") if path.parent.name not in APART)
    objects = {path: path.relative_to(root / "csrc").as_posix().replace("/", "_") + ".o" for path in sources}
    lines = [
        "rule cc",
        f"  command = {cxx} -MMD -MF $out.d {' '.join(FLAGS)} -I{root / 'csrc'} -c $in -o $out",
        "  depfile = $out.d",
        "rule ld",
        f"  command = {cxx} -fsanitize=address,undefined $in -o $out -pthread",
        *(f"build {name}: cc {path}" for path, name in objects.items()),
        f"build sanitize: ld {' '.join(objects.values())}",
    ]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def program() -> Path:
    """Returns the sanitized driver; changed sources are rebuilt (all of them: half a minute)."""
    root = Path(__file__).resolve().parents[2]
    cxx, ninja = compiler(), shutil.which("ninja")
    if cxx is None:
        pytest.skip("no C++ compiler with the address sanitizer")
    if ninja is None:
        pytest.skip("ninja is not on PATH; activate the environment or install it with the test extra")
    folder = root / "build" / "sanitize"
    folder.mkdir(parents=True, exist_ok=True)
    rules = ninja_file(root, cxx)
    if not (folder / "build.ninja").exists() or (folder / "build.ninja").read_text() != rules:
        (folder / "build.ninja").write_text(rules)
    done = subprocess.run([ninja, "-C", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    return folder / "sanitize"


def run(program: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    # Leaks are not detected: that needs ptrace, which containers forbid.
    settings |= {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run(
        [str(program), *arguments], env={**os.environ, **settings}, capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize("isa", ["portable", "avx2", "best"])
def test_random_ragged_inputs_pass_the_sanitizers(program: Path, isa: str) -> None:
    """best: the best of this machine; if it lacks the named one, the best below it."""
    done = run(program, str(CASES), SPECDEC_ISA=isa)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"{CASES} cases per operator: fine" in done.stdout


def test_the_sanitizer_detects_an_error(program: Path) -> None:
    done = run(program, "broken")
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr
