"""Files of datastores and text memories: contents are mapped back; truncated, damaged and foreign files are refused."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from specdec_fast.retrieval import file_format

ARRAYS = {
    "empty": np.zeros(0, np.int64),
    "tokens": np.arange(1000, dtype=np.uint16),
    "far": np.array([2**40, -1], np.int64),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "store"
    file_format.write(place, "demo", {"note": "ä"}, ARRAYS)
    return place


def test_contents_are_read_back(path: Path) -> None:
    header, arrays = file_format.read(path, "demo")
    assert header["note"] == "ä" and list(path.parent.iterdir()) == [path], "no unfinished file is left"
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype and np.array_equal(arrays[name], array)
    assert isinstance(arrays["tokens"], np.memmap)
    done: list[int] = []
    file_format.verify(path, header, arrays, done.append)
    assert sum(done) == sum(array.nbytes for array in ARRAYS.values())


def test_every_truncation_is_detected(path: Path) -> None:
    whole = path.read_bytes()
    for length in {*range(0, len(whole), 37), len(whole) - 1}:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="store: "):
            file_format.read(path, "demo")
    path.write_bytes(whole + b"\0" * 64)
    with pytest.raises(ValueError, match="the file is damaged"):
        file_format.read(path, "demo")


def test_damage_is_detected(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[-64 - 300] ^= 1  # in the tokens
    path.write_bytes(whole)
    header, arrays = file_format.read(path, "demo")
    with pytest.raises(ValueError, match="the checksum of its tokens is wrong"):
        file_format.verify(path, header, arrays)
    whole[30] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="the header's checksum is wrong"):
        file_format.read(path, "demo")


def test_foreign_files_are_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="got a demo file; expected a datastore file"):
        file_format.read(path, "datastore")
    whole = path.read_bytes()
    path.write_bytes(whole[:8] + struct.pack("<I", 9) + whole[12:])
    with pytest.raises(ValueError, match="got format version 9; expected 1; make the file again"):
        file_format.read(path, "demo")
    path.write_bytes(b"some text that is long enough for a prefix")
    with pytest.raises(ValueError, match="this is no demo file"):
        file_format.read(path, "demo")
    with pytest.raises(OSError):
        file_format.read(path.parent / "gone", "demo")


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bad: got float64 of 1 dimensions; expected one, of uint8"):
        file_format.write(tmp_path / "store", "demo", {}, {"bad": np.zeros(3)})
    with pytest.raises(TypeError):
        file_format.write(tmp_path / "store", "demo", {"bad": object()}, {})
    assert list(tmp_path.iterdir()) == []
