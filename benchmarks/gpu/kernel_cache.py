"""A portable Triton cache: compiled kernels in one file, for machines with the same Triton version.

    python -m benchmarks.gpu.kernel_cache pack FILE               # compiles and packs the kernels of a GPU session
    python -m benchmarks.gpu.kernel_cache load FILE --jobs steps  # into TRITON_CACHE_DIR; compiles if FILE does not fit

Triton finds a kernel by a hash whose first part names its own installation, and wheels for two versions of Python
differ in that part. The file stores the other parts of each key, and loading adds the local installation in front. For
each kernel it stores machine code and metadata; Triton reads nothing else. Neither command needs a GPU.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ARCHITECTURE = "sm_90"
MOST_BYTES = 40 * 10**6
"""Largest size of a packed file."""
TESTED = ((3, 6), (3, 9))
"""First and last minor version of Triton that the kernels are tested with."""
KEY = "specdec.key"
"""File beside a compiled kernel: its key without the name of Triton's installation."""
SOURCES = Path(__file__).parents[2] / "kernels" / "specdec_kernels"


@dataclass(frozen=True)
class Versions:
    """Everything that compiled kernels depend on.

    Attributes:
        triton: Version of Triton.
        ptxas: Version of ptxas.
        architecture: GPU architecture.
        sources: Hash of the modules with kernels.
    """

    triton: str
    ptxas: str
    architecture: str
    sources: str


def versions() -> Versions:
    """Returns the versions of this machine."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas_version

    code = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.py")):
        text = path.read_bytes()
        if b"triton" in text:
            code.update(path.relative_to(SOURCES).as_posix().encode() + text)
    ptxas = str(get_ptxas_version(int(ARCHITECTURE.removeprefix("sm_")))).strip().splitlines()[-1]
    return Versions(triton.__version__, ptxas, ARCHITECTURE, code.hexdigest()[:16])


def untested(version: str) -> str | None:
    """Returns a warning about a Triton version outside of the tested range, or None."""
    first, last = (".".join(map(str, each)) for each in TESTED)
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if TESTED[0] <= numbers <= TESTED[1]:
        return None
    return (
        f"Triton {version} is outside of the tested range {first} to {last}: kernels are compiled with it all the same"
    )


def _folder(key: str) -> str:
    """Returns the name of a kernel's folder in Triton's cache."""
    return base64.b32encode(hashlib.sha256(key.encode()).digest()).decode().rstrip("=")


def _installation() -> str:
    """Returns the first part of Triton's keys."""
    from triton.runtime.cache import triton_key

    return f"{triton_key()}-"


@contextmanager
def recorded_keys(cache: Path) -> Iterator[None]:
    """Records the key of every kernel that Triton compiles or finds in the cache, for `pack`."""
    from triton.compiler import compiler

    original = compiler.get_cache_key

    def get_cache_key(*args: Any, **kwargs: Any) -> str:
        key: str = original(*args, **kwargs)
        place = cache / _folder(key)
        place.mkdir(parents=True, exist_ok=True)
        (place / KEY).write_text(key.removeprefix(_installation()))
        return key

    compiler.get_cache_key = get_cache_key
    try:
        yield
    finally:
        compiler.get_cache_key = original


def pack(cache: Path, file: Path, made: Versions) -> int:
    """Packs the kernels of a Triton cache that have a recorded key.

    Args:
        cache: Triton's cache folder.
        file: Where the packed file goes (tar and xz).
        made: What the kernels were compiled with.

    Returns:
        The number of kernels.

    Raises:
        ValueError: If there are none, or the file would be larger than MOST_BYTES.
    """
    kernels = {}
    for key in sorted(cache.glob(f"*/{KEY}")):
        for group in key.parent.glob("__grp__*.json"):
            name = group.name.removeprefix("__grp__").removesuffix(".json")
            if (key.parent / f"{name}.cubin").exists():
                kernels[key.parent] = name
    if not kernels:
        raise ValueError(f"kernel_cache: {cache} holds no kernel with a recorded key; expected those of `pack`")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9) as tar:
        _add(tar, "versions.json", json.dumps(asdict(made)).encode())
        for place, name in sorted(kernels.items(), key=lambda each: (each[1], each[0])):  # like beside like
            for part in (KEY, f"{name}.json", f"{name}.cubin"):
                _add(tar, f"{place.name}/{part}", (place / part).read_bytes())
    if packed.tell() > MOST_BYTES:
        raise ValueError(f"kernel_cache: {packed.tell():,} bytes packed; expected at most {MOST_BYTES:,}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".new").write_bytes(packed.getvalue())
    file.with_suffix(".new").replace(file)
    return len(kernels)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def load(file: Path, cache: Path, here: Versions) -> tuple[int, str | None]:
    """Unpacks kernels into a Triton cache, under the keys of the Triton that is installed here.

    Args:
        file: A file that `pack` wrote.
        cache: Triton's cache folder; kernels that it holds stay.
        here: What kernels here must have been compiled with.

    Returns:
        The number of kernels that were loaded, and one line that says what does not fit, or None. Kernels of other
        sources are loaded too, since Triton finds a kernel by the hash of its own source.
    """
    if not file.exists():
        return 0, f"there is no {file}; `make gpu-cache` makes it"
    try:
        with tarfile.open(file, "r:xz") as tar:
            found = Versions(**json.loads(_read(tar, tar.next())))
            for name in ("architecture", "triton", "ptxas"):
                if getattr(found, name) != getattr(here, name):
                    return 0, f"{file} is for {name} {getattr(found, name)!r}, here is {getattr(here, name)!r}"
            count = _unpack(tar, cache)
    except (tarfile.TarError, EOFError, OSError, ValueError, TypeError, KeyError) as error:
        return 0, f"{file} is no packed cache, or is cut short ({type(error).__name__}: {error})"
    if found.sources != here.sources:
        return count, f"{file} was made from other kernel sources ({found.sources}, here {here.sources})"
    return count, None


def _unpack(tar: tarfile.TarFile, cache: Path) -> int:
    kernels: dict[str, dict[str, bytes]] = {}
    for entry in tar:
        place, _, name = entry.name.partition("/")
        if name:
            kernels.setdefault(place, {})[name] = _read(tar, entry)
    for parts in kernels.values():
        folder = cache / _folder(_installation() + parts.pop(KEY).decode())
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in parts.items():
            (folder / name).write_bytes(data)
        (metadata,) = (name for name in parts if name.endswith(".json"))
        group = {"child_paths": {name: str(folder / name) for name in parts}}
        (folder / f"__grp__{metadata}").write_text(json.dumps(group))  # last: with it Triton finds the kernel
    return len(kernels)


def _read(tar: tarfile.TarFile, entry: tarfile.TarInfo | None) -> bytes:
    stream = tar.extractfile(entry) if entry is not None else None
    if stream is None:
        raise ValueError("a part without contents")
    return stream.read()


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns 1 if a kernel could not be compiled."""
    from benchmarks.gpu import cache_jobs

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("pack", "load"))
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--jobs", choices=list(cache_jobs.JOBS), nargs="*", help="what is compiled; pack: all by default"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    cache, here, started = Path(os.environ["TRITON_CACHE_DIR"]), versions(), time.monotonic()
    if words := untested(here.triton):
        print(words)
    if options.command == "pack":
        jobs = [name for name in cache_jobs.JOBS if name != "tiny"] if options.jobs is None else options.jobs
        for key in cache.glob(f"*/{KEY}"):  # of earlier sources
            key.unlink()
        failed = cache_jobs.compile_all(jobs, cache, options.processes)
        count = pack(cache, options.file, here)
        print(f"{options.file}: {count} kernels, {options.file.stat().st_size:,} bytes, {failed} jobs failed")
        return failed > 0
    count, reason = load(options.file, cache, here)
    print(f"{count} kernels loaded in {time.monotonic() - started:.0f} s with Triton {here.triton}, {here.ptxas}")
    if reason is None:
        return 0
    when = f"here in {options.processes} processes" if options.jobs else "when they are first launched"
    print(f"kernel cache: {reason}; kernels are compiled {when}")
    return cache_jobs.compile_all(options.jobs or [], cache, options.processes) > 0


if __name__ == "__main__":
    sys.exit(main())
