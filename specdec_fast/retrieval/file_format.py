"""Files of retrieval indices: a header with the content, then arrays that can be mapped. Versioned and checked.

Layout: 8 bytes of magic, uint32 version, uint32 length of the header, uint32 CRC-32 of the header, the header as JSON,
then the arrays at multiples of 64 bytes. The header has each array's dtype, length, offset and CRC-32. Little endian.
Tests: tests/retrieval/test_file_format.py.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"specdec\x1a"
VERSION = 1
_PREFIX = struct.Struct("<8sIII")
_ALIGN = 64
_CHUNK = 1 << 22  # elements that are written or summed at once
DTYPES = ("uint8", "uint16", "uint32", "int64")

Report = Callable[[int], None]


def _pieces(array: np.ndarray[Any, Any]) -> Any:
    for start in range(0, len(array), _CHUNK):
        yield np.ascontiguousarray(array[start : start + _CHUNK])


def _checksum(array: np.ndarray[Any, Any], report: Report | None = None) -> int:
    crc = 0
    for piece in _pieces(array):
        crc = zlib.crc32(piece.view(np.uint8), crc)
        if report is not None:
            report(piece.nbytes)
    return crc


def write(path: str | Path, kind: str, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Writes a file, which appears under its name only when it is complete.

    Args:
        path: The file.
        kind: Kind of the file, such as "datastore".
        header: JSON values.
        arrays: One-dimensional arrays by name, with a dtype of `DTYPES`.

    Raises:
        ValueError: If an array has another shape or dtype.
    """
    sections: dict[str, dict[str, Any]] = {}
    offset = 0  # relative to the first multiple of _ALIGN behind the header
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.name not in DTYPES:
            raise ValueError(
                f"{name}: got {array.dtype} of {array.ndim} dimensions; expected one, of {', '.join(DTYPES)}"
            )
        sections[name] = {"dtype": array.dtype.name, "length": len(array), "offset": offset, "crc32": _checksum(array)}
        offset += -(-array.nbytes // _ALIGN) * _ALIGN
    text = json.dumps({"kind": kind, **header, "sections": sections}, sort_keys=True).encode()
    place = Path(path)
    part = place.with_name(f"{place.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(_PREFIX.pack(MAGIC, VERSION, len(text), zlib.crc32(text)))
            file.write(text)
            for array in arrays.values():
                file.write(bytes(-file.tell() % _ALIGN))
                for piece in _pieces(array):
                    file.write(piece.view(np.uint8).data)
            file.write(bytes(-file.tell() % _ALIGN))
        part.replace(place)
    finally:
        part.unlink(missing_ok=True)


def read(path: str | Path, kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """Opens a file. Arrays are mapped, not read; `verify` checks their content.

    Args:
        path: The file.
        kind: Expected kind.

    Returns:
        The header, and the arrays by name.

    Raises:
        ValueError: If the file is of another format, kind or version, or is truncated or damaged in its header.
        OSError: If it cannot be opened.
    """
    place = Path(path)
    size = place.stat().st_size
    with place.open("rb") as file:
        prefix = file.read(_PREFIX.size)
        magic, version, length, crc = _PREFIX.unpack(prefix) if len(prefix) == _PREFIX.size else (b"", 0, 0, 0)
        if magic != MAGIC:
            raise ValueError(f"{place}: this is no {kind} file; expected one that specdec wrote")
        if version != VERSION:
            raise ValueError(f"{place}: got format version {version}; expected {VERSION}; make the file again")
        text = file.read(min(length, size))
    if len(text) != length:
        raise ValueError(f"{place}: the file ends inside its header; it was cut off; make it again")
    if zlib.crc32(text) != crc:
        raise ValueError(f"{place}: the header's checksum is wrong; the file is damaged; make it again")
    header: dict[str, Any] = json.loads(text)
    if header.get("kind") != kind:
        raise ValueError(f"{place}: got a {header.get('kind')} file; expected a {kind} file")
    start = -(-(_PREFIX.size + length) // _ALIGN) * _ALIGN
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    end = start
    for name, section in header["sections"].items():
        dtype = np.dtype(section["dtype"]).newbyteorder("<")
        at, count = start + section["offset"], section["length"]
        end = max(end, at + -(-count * dtype.itemsize // _ALIGN) * _ALIGN)
        if end > size:
            raise ValueError(
                f"{place}: got {size} bytes; expected at least {end} for its {name}; it was cut off; make it again"
            )
        arrays[name] = np.memmap(place, dtype, "r", at, (count,)) if count else np.zeros(0, dtype)
    if size != end:
        raise ValueError(f"{place}: got {size} bytes; expected {end}; the file is damaged; make it again")
    return header, arrays


def verify(
    path: str | Path,
    header: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray[Any, Any]],
    report: Report | None = None,
) -> None:
    """Reads all arrays and compares checksums.

    Args:
        path: The file, for messages.
        header: Its header.
        arrays: Its arrays.
        report: Called with the bytes of each part.

    Raises:
        ValueError: If an array is not as it was written.
    """
    for name, array in arrays.items():
        if _checksum(array, report) != header["sections"][name]["crc32"]:
            raise ValueError(f"{path}: the checksum of its {name} is wrong; the file is damaged; make it again")
