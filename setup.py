"""Builds the optional compiled extensions; everything else is declared in pyproject.toml.

SPECDEC_BUILD chooses what is compiled:
  auto (default)  what this machine can build; a failure leaves an install that works through the references
  cpu             the CPU extension, and a failure is an error
  cuda            the CPU and the CUDA extension, and a failure is an error
  none            nothing; an editable or in-place build deletes the modules of earlier ones

Three kinds of module:
  specdec_kernels._C       csrc/**/*.cpp: operators for CPU; libtorch stable ABI, one binary for torch >= 2.10
                           and Python >= 3.10
  specdec_kernels._C_cuda  csrc/**/*.cu: operators for CUDA; the same ABI; needs a CUDA torch and nvcc
  specdec_kernels._<name>  csrc/bindings/pybind_<name>.cpp + csrc/<name>/**/*.cpp: C++ objects without
                           tensors, bound by pybind11 (none of them uses torch)
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "csrc"
MODES = ("auto", "cpu", "cuda", "none")
MODE = os.environ.get("SPECDEC_BUILD", "auto").lower()
if MODE not in MODES:
    raise SystemExit(f"SPECDEC_BUILD={MODE!r} is not one of {', '.join(MODES)}")

# pip runs this file several times; those that only ask for metadata need not import torch.
ONLY_METADATA = len(sys.argv) > 1 and sys.argv[1] in ("egg_info", "dist_info")

STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # torch 2.10
# No fused multiply-add unless written as an intrinsic: noise must have the same bits in every backend.
CXX_FLAGS = [
    "-O3",
    "-g0",
    "-std=c++20",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-psabi",
]

CUDA_MODULE = "specdec_kernels._C_cuda"
# What CUDA code is built for where no GPU is visible to ask; +PTX serves newer ones.
ARCHITECTURES = "8.0;9.0+PTX"


def say(message: str) -> None:
    print(f"specdec-fast: {message}", file=sys.stderr, flush=True)


class Progress:
    """Says how many files are compiled, at the start, every ten seconds and at the end.

    pip shows these lines with -v alone; the Makefile picks them from its output.
    """

    EVERY = 10.0

    def __init__(self, folder: str, files: int, write=say) -> None:
        self.folder, self.files, self.write = Path(folder), files, write
        self.over = threading.Event()

    def __enter__(self) -> Progress:
        self.began, self.first = time.monotonic(), time.time()
        self.fresh = not self.objects()
        kept = "" if self.fresh else "; those that did not change are kept"
        self.write(f"compiling {self.files} files, which takes a few minutes{kept}")
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()
        self.write(self.line())

    def watch(self) -> None:
        while not self.over.wait(self.EVERY):
            self.write(self.line())

    def objects(self) -> list[Path]:
        return [path for kind in ("*.o", "*.obj") for path in self.folder.rglob(kind)]

    def line(self) -> str:
        # a compiler writes an object when it is done with it; file systems may round times down by two seconds
        done = sum(path.exists() and path.stat().st_mtime > self.first - 2 for path in self.objects())
        of = f" of {self.files}" if self.fresh else ""
        return f"compiled {done}{of} files in {time.monotonic() - self.began:.0f} s"


def import_torch():
    """torch of this environment, or, under pip's build isolation, of the environment being installed into."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        pass
    # Build isolation hides site-packages but keeps sys.prefix. Appended last, so the isolated setuptools
    # wins.
    for folder in dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]):
        if os.path.isdir(os.path.join(folder, "torch")) and folder not in sys.path:
            sys.path.append(folder)
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


def toolkit_root() -> str | None:
    """Folder of the CUDA toolkit that nvcc on PATH belongs to (it may be a wrapper script elsewhere)."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    probe = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True)
    for line in probe.stderr.splitlines():
        key, _, value = line.removeprefix("#$ ").partition("=")
        if key == "TOP":
            return os.path.normpath(value.strip())
    return str(Path(nvcc).resolve().parent.parent)


def relative(paths) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def pybind_modules() -> dict[str, list[str]]:
    """Module name -> sources of every C++ object module."""
    found = {}
    for binding in sorted((SOURCES / "bindings").glob("pybind_*.cpp")):
        name = binding.stem.removeprefix("pybind_")
        found[name] = relative([binding, *(SOURCES / name).rglob("*.cpp")])
    return found


def operator_sources(suffix: str) -> list[str]:
    apart = {SOURCES / "sanitize"} | {SOURCES / name for name in pybind_modules()}
    return relative(
        path
        for path in SOURCES.rglob(f"*{suffix}")
        if not path.name.startswith("pybind_") and not apart & set(path.parents)
    )


def pybind_extensions() -> list:
    modules = pybind_modules()
    if not modules:
        return []
    try:
        from pybind11.setup_helpers import Pybind11Extension
    except ImportError:
        if MODE != "auto":
            raise SystemExit(f"specdec-fast: SPECDEC_BUILD={MODE} needs pybind11: pip install pybind11") from None
        say("pybind11 was not found, so suffix structures run in Python; pip install pybind11 and run this again")
        return []

    return [
        Pybind11Extension(
            f"specdec_kernels._{name}",
            sources,
            cxx_std=17,
            include_dirs=[str(SOURCES)],
            extra_compile_args=CXX_FLAGS,
        )
        for name, sources in modules.items()
    ]


def delete_modules() -> None:
    """Delete what earlier builds left among the sources: it would be loaded."""
    for path in sorted((ROOT / "kernels" / "specdec_kernels").glob("_*")):
        if path.suffix in (".so", ".pyd"):
            path.unlink()
            say(f"{path.name} of an earlier build was deleted: SPECDEC_BUILD=none")


class EditableWithout(editable_wheel):
    """`pip install -e .` where nothing is to be compiled."""

    def run(self) -> None:
        delete_modules()
        super().run()


class InPlaceWithout(build_ext):
    """`setup.py build_ext --inplace` where nothing is to be compiled."""

    def run(self) -> None:
        if self.inplace:
            delete_modules()
        super().run()


def extensions(torch) -> tuple[list, type]:
    """(extension modules, build command)."""
    if MODE == "none" and not ONLY_METADATA:
        say("SPECDEC_BUILD=none: no extension is built; operators run through their PyTorch references")
        return [], InPlaceWithout
    if ONLY_METADATA:
        return [], build_ext
    if torch is None:
        if MODE != "auto":
            raise SystemExit(
                f"specdec-fast: SPECDEC_BUILD={MODE} but torch cannot be imported by this build. Install "
                "torch first; if it is installed, build with `pip install --no-build-isolation -e .`"
            )
        say(
            "torch was not found, so no extension is built; operators run through their PyTorch references. "
            "Install torch first and run the same command again to have the compiled operators."
        )
        return [], build_ext
    root = toolkit_root()
    if root is not None:
        os.environ.setdefault("CUDA_HOME", root)
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    modules = pybind_extensions()
    cpu = operator_sources(".cpp")
    if cpu:
        modules.append(
            CppExtension(
                "specdec_kernels._C",
                cpu,
                include_dirs=[str(SOURCES)],
                py_limited_api=True,
                extra_compile_args={"cxx": [*CXX_FLAGS, STABLE_ABI]},
            )
        )
    cuda = operator_sources(".cu")
    can_cuda = torch.version.cuda is not None and root is not None
    if MODE == "cuda" and not can_cuda:
        raise SystemExit(
            f"specdec-fast: SPECDEC_BUILD=cuda needs a CUDA build of torch (found {torch.__version__}) "
            f"and nvcc on PATH ({'found' if root else 'not found'})"
        )
    if cuda and can_cuda and MODE in ("auto", "cuda"):
        if not torch.cuda.is_available() and not os.environ.get("TORCH_CUDA_ARCH_LIST"):
            os.environ["TORCH_CUDA_ARCH_LIST"] = ARCHITECTURES
            say(f"no GPU is visible, so CUDA code is built for {ARCHITECTURES}; TORCH_CUDA_ARCH_LIST names others")
        modules.append(
            CUDAExtension(
                CUDA_MODULE,
                cuda,
                include_dirs=[str(SOURCES)],
                py_limited_api=True,
                extra_compile_args={
                    "cxx": [*CXX_FLAGS, STABLE_ABI, "-DUSE_CUDA"],
                    "nvcc": ["-O3", "-std=c++20", "--fmad=false", STABLE_ABI, "-DUSE_CUDA"],
                },
            )
        )

    class Build(BuildExtension):
        """Keeps its objects between installs and, in auto mode, survives a failing compiler."""

        def finalize_options(self) -> None:
            super().finalize_options()
            # pip hands out a temporary folder; a lasting one lets ninja reuse objects. Keyed by what changes
            # them.
            tag = f"{sys.implementation.cache_tag}-{platform.machine()}-torch{torch.__version__}"
            self.build_temp = str(ROOT / "build" / f"objects-{tag}")
            if MODE == "auto":
                for extension in self.extensions or []:
                    extension.optional = True

        def run(self) -> None:
            inplace = self.inplace
            self.failed: list[str] = []
            earlier = self.in_place() if MODE == "auto" and inplace else []
            for path in earlier:  # so that nothing is loaded that is not of these sources
                path.unlink()
            # nor packed: nobody compares the age of headers with theirs
            for path in Path(self.build_lib, "specdec_kernels").glob("_*"):
                if path.suffix in (".so", ".pyd"):
                    path.unlink()
            try:
                files = sum(len(extension.sources) for extension in self.extensions or [])
                with Progress(self.build_temp, files):
                    self.run_without_what_fails(super().run)
            except (Exception, SystemExit) as error:
                if MODE != "auto":
                    raise
                self.inplace = inplace
                self.failed.append("specdec_kernels._C")
                say(f"the extension was NOT built: {type(error).__name__}: {error}")
            if "specdec_kernels._C" in self.failed:
                say(
                    "the install goes on without it and operators run through their PyTorch references. For "
                    "speed, install a C++20 compiler (g++ 12 or clang 14 and later) and run the same command "
                    "again; SPECDEC_BUILD=cpu turns this message into an error."
                )
            for path in earlier:
                if not path.exists():
                    say(f"{path.name} of an earlier build was deleted: it is not what the sources say now")

        def run_without_what_fails(self, run) -> None:
            """All, or all without CUDA's: torch looks at nvcc and its compiler before it builds any of them."""
            before = self.inplace, self.compiler
            try:
                run()
            except (Exception, SystemExit) as error:
                unfit = [each for each in self.extensions or [] if each.name == CUDA_MODULE]
                if MODE != "auto" or not unfit:
                    raise
                say(f"{CUDA_MODULE} was NOT built, the others go on: {type(error).__name__}: {error}")
                self.extensions.remove(*unfit)
                self.inplace, self.compiler = before
                run()

        def build_extension(self, extension) -> None:
            try:
                super().build_extension(extension)
            except (Exception, SystemExit) as error:
                if MODE != "auto":
                    raise
                self.failed.append(extension.name)
                say(f"{extension.name} was NOT built, the others go on: {type(error).__name__}: {error}")

        def in_place(self) -> list[Path]:
            """Modules of this build that lie among the sources."""
            paths = [Path(self.get_ext_fullpath(extension.name)) for extension in self.extensions or []]
            return [path for path in paths if path.exists()]

    return modules, Build


EXTENSIONS, BUILD = extensions(None if ONLY_METADATA or MODE == "none" else import_torch())
STABLE_ONLY = bool(EXTENSIONS) and all(getattr(e, "py_limited_api", False) for e in EXTENSIONS)

setup(
    packages=[
        *find_packages(include=["specdec_fast", "specdec_fast.*"]),
        *find_packages("kernels", include=["specdec_kernels", "specdec_kernels.*"]),
    ],
    package_dir={"specdec_kernels": "kernels/specdec_kernels"},
    ext_modules=EXTENSIONS,
    cmdclass={"build_ext": BUILD, **({"editable_wheel": EditableWithout} if BUILD is InPlaceWithout else {})},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE_ONLY else {},
)
