"""The build: sources that setup.py compiles per mode, dependencies of the binary, compilation of CUDA sources."""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import setuptools
import torch

from specdec_kernels.dispatch.extras import install_hint

ROOT = Path(__file__).resolve().parents[2]
SETUP = (ROOT / "setup.py").read_text()
OPERATORS = ("kernels", "specdec_kernels")
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


def declared(monkeypatch: pytest.MonkeyPatch, mode: str, root: Path = ROOT, command: str = "build") -> dict[str, Any]:
    """Returns what setup.py passes to setuptools in a mode."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", seen.update)
    monkeypatch.setattr(sys, "argv", ["setup.py", command])
    monkeypatch.setenv("SPECDEC_BUILD", mode)
    monkeypatch.chdir(root)
    runpy.run_path(str(root / "setup.py"))
    return seen


def build_command(seen: dict[str, Any], **settings: Any) -> Any:
    """Returns the command that builds the declared extensions, with these settings."""
    from setuptools.dist import Distribution

    made = Distribution({name: seen[name] for name in ("ext_modules", "package_dir")})
    command = seen["cmdclass"]["build_ext"](made)
    for name, value in settings.items():
        setattr(command, name, value)
    command.ensure_finalized()
    return command


def test_the_cpu_extension_is_every_source_but_the_test_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    *objects, extension = declared(monkeypatch, "cpu")["ext_modules"]
    sources = set(extension.sources)
    assert [each.name for each in objects] == ["specdec_kernels._suffix"]
    assert not sources & {source for each in objects for source in each.sources}
    assert extension.name == "specdec_kernels._C" and extension.py_limited_api
    assert {"csrc/bindings/module.cpp", "csrc/attention/tree_attention.cpp"} <= sources
    apart = {p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc" / "sanitize").rglob("*.cpp")}
    pybind = {p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc" / "bindings").glob("pybind_*.cpp")}
    assert apart and not sources & (apart | pybind)
    flags = extension.extra_compile_args["cxx"]
    assert "-ffp-contract=off" in flags and not [f for f in flags if f.startswith("-march")]


def test_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert declared(monkeypatch, "none")["ext_modules"] == []
    assert declared(monkeypatch, "auto", command="dist_info")["ext_modules"] == []
    with pytest.raises(SystemExit, match="not one of auto, cpu, cuda, none"):
        declared(monkeypatch, "fast")
    if torch.version.cuda is None:
        with pytest.raises(SystemExit, match="needs a CUDA build of torch"):
            declared(monkeypatch, "cuda")


def test_without_torch_auto_continues_and_cpu_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert declared(monkeypatch, "auto")["ext_modules"] == []
    with pytest.raises(SystemExit, match="Install torch first"):
        declared(monkeypatch, "cpu")


UNDER_ISOLATION = """
import runpy, setuptools, sys, sysconfig
libraries = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
sys.path[:] = [path for path in sys.path if path not in libraries]
sys.argv = ["setup.py", "build"]
setuptools.setup = lambda **declared: print(*(each.name for each in declared["ext_modules"]))
runpy.run_path("setup.py")
"""


def test_under_build_isolation_torch_is_found_in_the_target_environment() -> None:
    env = {**os.environ, "SPECDEC_BUILD": "cpu"}
    done = subprocess.run([sys.executable, "-c", UNDER_ISOLATION], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["specdec_kernels._suffix", "specdec_kernels._C"]


@pytest.mark.slow
def test_the_wheel_holds_the_data_files_of_the_packages(
    tmp_path: Path, root: Path, listed: Callable[[Path], list[Path]]
) -> None:
    """Without flags, and without the extensions, whose build other tests check."""
    for path in listed(root):
        copy = tmp_path / "tree" / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "-w", str(tmp_path)]
    env = {**os.environ, "SPECDEC_BUILD": "none"}
    done = subprocess.run(command, cwd=tmp_path / "tree", env=env, capture_output=True, text=True)
    if done.returncode and re.search(r"Could not find a version|Temporary failure|Connection", done.stderr):
        pytest.skip("needs a package index: isolated builds of pip download setuptools")
    assert done.returncode == 0, done.stderr[-4000:]
    (wheel,) = tmp_path.glob("specdec_fast-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    packages = [path.relative_to(root) for path in listed(root) if path.suffix != ".so"]
    wanted = {path.as_posix() for path in packages if path.parts[0] == "specdec_fast"}
    wanted |= {path.relative_to("kernels").as_posix() for path in packages if path.parts[:2] == OPERATORS}
    models = {f"specdec_fast/assets/{name}/model.safetensors" for name in ("demo-target", "demo-draft", "demo-hybrid")}
    assert {*models, "specdec_fast/assets/demo-hybrid.md", "specdec_kernels/__init__.py"} <= wanted
    assert sorted(wanted - held) == []
    outside = [name for name in held - wanted if ".dist-info/" not in name]
    assert outside == []
    licences = {name.rpartition("/")[2] for name in held if "/licenses/" in name}
    assert licences == {"LICENSE", "LICENSE-PSF"}


def test_a_failing_compiler_stops_explicit_builds_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.utils.cpp_extension import BuildExtension

    def fail(command: Any) -> None:
        raise RuntimeError("no such compiler")

    for mode in ("auto", "cpu"):
        seen = declared(monkeypatch, mode)
        with monkeypatch.context() as patch:
            patch.setattr(BuildExtension, "run", fail, raising=False)
            command = build_command(seen)
            if mode == "auto":
                command.run()
                assert all(extension.optional for extension in command.extensions)
                assert "the extension was NOT built: RuntimeError: no such compiler" in capsys.readouterr().err
            else:
                with pytest.raises(RuntimeError, match="no such compiler"):
                    command.run()
        assert Path(command.build_temp).parent == ROOT / "build"  # kept between runs, so that ninja finds its objects


def with_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Simulates a torch with CUDA, an nvcc, and no GPU."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(nvcc.parent), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))


def test_without_a_gpu_cuda_code_is_built_for_named_architectures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """torch's own search for architectures fails without a visible GPU."""
    with_toolkit(monkeypatch, tmp_path)
    for given in ("8.6", "", None):
        monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
        if given is not None:
            monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", given)
        names = [each.name for each in declared(monkeypatch, "auto")["ext_modules"]]
        assert names == ["specdec_kernels._suffix", "specdec_kernels._C", "specdec_kernels._C_cuda"]
        assert os.environ["TORCH_CUDA_ARCH_LIST"] == (given or "8.0;9.0+PTX")
        assert ("no GPU is visible" in capsys.readouterr().err) == (not given)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")


def test_a_toolkit_that_does_not_fit_torch_skips_the_cuda_extension_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """torch compares versions before it builds. Modules of earlier builds do not replace those that fail."""
    from torch.utils.cpp_extension import BuildExtension

    with_toolkit(monkeypatch, tmp_path)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    runs: list[list[str]] = []

    def look(command: Any) -> None:
        assert command.compiler is None, "as at first"
        runs.append([each.name.removeprefix("specdec_kernels.") for each in command.extensions])
        command.compiler = object()
        if "_C_cuda" in runs[-1]:
            raise RuntimeError("The detected CUDA version (12.4) mismatches the version that was used (13.0)")

    for mode in ("auto", "cuda"):
        seen = declared(monkeypatch, mode)
        with monkeypatch.context() as patch:
            patch.setattr(BuildExtension, "run", look, raising=False)
            command = build_command(seen, build_lib=str(tmp_path / "lib"))
            old = [tmp_path / "lib" / "specdec_kernels" / name for name in ("_C.abi3.so", "_gone.abi3.so")]
            old[0].parent.mkdir(parents=True, exist_ok=True)
            for path in old:
                path.touch()
            if mode == "cuda":
                with pytest.raises(RuntimeError, match="mismatches"):
                    command.run()
            else:
                command.run()
        assert not any(path.exists() for path in old)
    assert runs == [["_suffix", "_C", "_C_cuda"], ["_suffix", "_C"], ["_suffix", "_C", "_C_cuda"]]
    printed = capsys.readouterr().err
    assert printed.count("_C_cuda was NOT built, the others go on: RuntimeError: The detected CUDA version") == 1
    assert "C++20 compiler" not in printed


def test_a_failing_extension_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.utils.cpp_extension import BuildExtension

    for mode, bad in (("auto", "_suffix"), ("auto", "_C"), ("cpu", "_suffix")):
        seen, built = declared(monkeypatch, mode), []

        def build(command: Any, extension: Any, built: list[str] = built, bad: str = bad) -> None:
            if extension.name.endswith(bad):
                raise IndexError("list index out of range")
            built.append(extension.name)

        with monkeypatch.context() as patch:
            patch.setattr(BuildExtension, "build_extension", build, raising=False)
            command = build_command(seen)
            if mode == "cpu":
                with pytest.raises(IndexError):
                    command.run()
                continue
            command.run()
        assert {"specdec_kernels._suffix", "specdec_kernels._C"} - set(built) == {f"specdec_kernels.{bad}"}
        printed = capsys.readouterr().err
        assert f"specdec_kernels.{bad} was NOT built, the others go on: IndexError: list index out of range" in printed
        assert ("install a C++20 compiler" in printed) == (bad == "_C")


@pytest.mark.parametrize("caught", [False, True], ids=["raises", "warns"])
def test_a_failing_compiler_leaves_no_module_of_other_sources(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, caught: bool
) -> None:
    """Of modules compiled in place, new ones stay and old ones are deleted."""
    from torch.utils.cpp_extension import BuildExtension

    (tmp_path / "setup.py").write_text(SETUP)
    package = tmp_path / "kernels" / "specdec_kernels"
    for path in (tmp_path / "csrc" / "bindings" / "module.cpp", package / "_C_cuda.so", package / "_C.abi3.so"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("old")

    def fail(command: Any) -> None:
        if not caught:
            raise RuntimeError("no such compiler")

    def succeed(command: Any) -> None:
        (package / "_C.abi3.so").write_text("new")

    for run, left, deleted in ((succeed, "new", 0), (fail, "", 1)):
        seen = declared(monkeypatch, "auto", tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(BuildExtension, "run", run, raising=False)
            build_command(seen, inplace=True).run()
        found = package / "_C.abi3.so"
        assert (found.read_text() if found.exists() else "") == left
        assert capsys.readouterr().err.count("_C.abi3.so of an earlier build was deleted") == deleted
    assert (package / "_C_cuda.so").read_text() == "old", "not of this build"


def test_none_leaves_no_module_of_an_earlier_build_in_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Declarations and builds elsewhere delete nothing; builds in place do."""
    from setuptools.command.editable_wheel import editable_wheel
    from setuptools.dist import Distribution

    (tmp_path / "setup.py").write_text(SETUP)
    package = tmp_path / "kernels" / "specdec_kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    built = [package / name for name in ("_C.abi3.so", "_C_cuda.abi3.so", "_suffix.cpython-311-x86_64-linux-gnu.so")]
    commands = declared(monkeypatch, "none", tmp_path)["cmdclass"]
    monkeypatch.setattr(editable_wheel, "run", lambda command: None)
    for name, in_place, left in (("build_ext", 0, 3), ("build_ext", 1, 0), ("editable_wheel", None, 0)):
        for path in built:
            path.touch()
        command = commands[name](Distribution())
        if in_place is not None:
            command.inplace = in_place
            command.ensure_finalized()
        command.run()
        assert sum(path.exists() for path in built) == left and (package / "__init__.py").exists()
        printed = capsys.readouterr().err
        assert printed.count("of an earlier build was deleted: SPECDEC_BUILD=none") == len(built) - left
    assert "editable_wheel" not in declared(monkeypatch, "auto", tmp_path)["cmdclass"]


def test_a_module_of_cpp_objects_can_be_added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("pybind11")
    (tmp_path / "setup.py").write_text(SETUP)
    for source in ("bindings/module.cpp", "bindings/pybind_demo.cpp", "demo/demo.cpp", "sanitize/main.cpp"):
        path = tmp_path / "csrc" / source
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "kernels").mkdir()
    seen = declared(monkeypatch, "cpu", tmp_path)
    modules = {extension.name: extension.sources for extension in seen["ext_modules"]}
    assert modules == {
        "specdec_kernels._demo": ["csrc/bindings/pybind_demo.cpp", "csrc/demo/demo.cpp"],
        "specdec_kernels._C": ["csrc/bindings/module.cpp"],
    }
    assert seen["options"] == {}, "a wheel with a pybind11 module fits one Python version only"


def project() -> dict[str, Any]:
    if sys.version_info < (3, 11):
        pytest.skip("tomllib is new in Python 3.11")
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_messages_name_extras_that_exist() -> None:
    extras = project()["project"]["optional-dependencies"]
    named: list[str] = []
    for folder in ("specdec_fast", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            named += re.findall(r"\b(?:install|require)\([\"'](\w+)[\"']", source)
            assert "specdec-fast[" not in source, f"{path}: say it by specdec_kernels.dispatch.extras.install_hint"
    assert len(named) >= 8 and set(named) <= extras.keys()
    assert install_hint("lab") == "run `pip install -e '.[lab]'` in the checkout"


def test_torch_is_a_dependency_of_the_package_but_not_of_its_build() -> None:
    config = project()
    assert not [r for r in config["build-system"]["requires"] if r.startswith("torch")]
    assert [r for r in config["project"]["dependencies"] if r.startswith("torch>=")] == ["torch>=2.11"]
    assert config["project"]["scripts"] == {"specdec": "specdec_fast.__main__:run"}
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would shadow another package of that name"


BINARY = ROOT / "kernels" / "specdec_kernels" / "_C.abi3.so"


@pytest.mark.skipif(not BINARY.exists() or shutil.which("nm") is None, reason="needs the built extension and nm")
def test_the_binary_needs_only_the_stable_abi() -> None:
    """One file for torch 2.11 to 2.15: no mangled symbol of torch, only its C shims."""
    table = subprocess.run(["nm", "-D", "--undefined-only", str(BINARY)], capture_output=True, text=True, check=True)
    needed = [line.split()[-1] for line in table.stdout.splitlines()]
    assert not [name for name in needed if re.match(r"_ZN?K?\d*(2at|3c10|5torch)", name)]
    assert [name for name in needed if name.startswith(("aoti_torch_", "torch_"))]
    exported = subprocess.run(["nm", "-D", "--defined-only", str(BINARY)], capture_output=True, text=True, check=True)
    assert "PyInit__C" in exported.stdout and "tree_attention" not in exported.stdout


def cuda_sources() -> list[Path]:
    return sorted((ROOT / "csrc").rglob("*.cu"))


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize("source", cuda_sources(), ids=lambda path: path.name)
def test_cuda_sources_compile(source: Path) -> None:
    """For sm_80, sm_90 and sm_100; skips the compiler when the same text was compiled before."""
    from torch.utils.cpp_extension import include_paths

    text = hashlib.sha256(f"{torch.__version__} {ARCHITECTURES}".encode())
    for path in (source, *sorted((ROOT / "csrc").rglob("*.h"))):
        text.update(path.read_bytes())
    stamp = ROOT / "build" / "nvcc-check" / f"{source.name}-{text.hexdigest()[:16]}"
    if stamp.exists():
        return
    stamp.parent.mkdir(parents=True, exist_ok=True)
    includes = [ROOT / "csrc", *include_paths(), sysconfig.get_path("include")]
    command = [
        "nvcc", "-c", "-O3", "-std=c++20", "--fmad=false", "-DUSE_CUDA",
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
        "-DPy_LIMITED_API=0x030A0000", "-Xcompiler", "-fPIC", "-Xptxas", "-v",
        "-gencode", f"arch=compute_80,code=[{','.join(ARCHITECTURES)}]",
        *(f"-I{path}" for path in includes), str(source), "-o", str(stamp) + ".o",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    spills = [line for line in done.stderr.splitlines() if "spill" in line and "0 bytes spill stores" not in line]
    assert spills == []
    stamp.touch()
