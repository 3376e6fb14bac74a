"""`specdec datastore`: building from files, information, and generation."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec_fast.commands import datastore
from specdec_fast.retrieval.datastore import Datastore
from specdec_fast.retrieval.documents import read_documents


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("the quick brown fox")
    (folder / "deep" / "b.jsonl").write_text('{"text": "the lazy dog"}\n\n{"text": "the quick dog", "other": 1}\n')
    (folder / "ignored.bin").write_bytes(b"\xff")
    return folder


def test_text_and_jsonl(run: Callable[..., Any], models: dict[str, str], texts: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = run("datastore", "build", str(texts), "--output", str(store), "--model", models["target"], "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["documents"], found["tokens"], found["vocab_size"]) == (3, 19 + 12 + 13, 96)
    assert Datastore(store).num_documents == 3
    told = json.loads(run("datastore", "info", str(store), "--verify", "--json").stdout)
    assert told["verified"] and told["vocabulary"] == found["vocabulary"] and told["bytes"] == store.stat().st_size
    for more, words in (([], "not checked (--verify)"), (["--verify"], "right")):
        shown = run("datastore", "info", str(store), *more).stdout
        assert "documents" in shown and re.search(rf"^checksums +{re.escape(words)} *$", shown, flags=re.MULTILINE)


@pytest.mark.parametrize("stage", ["reading", "sorting", "writing"])
def test_ctrl_c_leaves_the_old_file(
    run: Callable[..., Any], models: dict[str, str], texts: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def interrupted(_: object, now: str, tokens: int) -> None:
        if now == stage:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(datastore._Progress, "__call__", interrupted)
    folder = texts / "out"
    folder.mkdir()
    (folder / "store").write_text("an older one")
    done = run("datastore", "build", str(texts / "a.txt"), "-o", str(folder / "store"), "--model", models["target"])
    assert done.exit_code == 130 and done.stdout == ""
    assert done.stderr == f"specdec: interrupted; nothing was written to {folder / 'store'}\n"
    assert [each.read_text() for each in folder.iterdir()] == ["an older one"]


def test_halves_of_surrogate_pairs_are_replaced(
    run: Callable[..., Any], models: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "cut.jsonl").write_text('{"text": "a cut emoji \\ud83d"}\n{"text": "a whole one \\ud83d\\ude00"}\n')
    done = run(
        "datastore", "build", str(tmp_path / "cut.jsonl"), "-o", str(tmp_path / "s"), "--model", models["target"]
    )
    assert done.exit_code == 0 and Datastore(tmp_path / "s").num_documents == 2, done.output
    assert [*read_documents([tmp_path / "cut.jsonl"])] == ["a cut emoji \ufffd", "a whole one \U0001f600"]


def test_generation_with_it(run: Callable[..., Any], models: dict[str, str], texts: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    run("datastore", "build", str(texts), "--output", str(store), "--model", models["target"])
    ask = ("generate", "the quick", "--model", models["target"], "--max-new-tokens", "8", "--seed", "1", "--json")
    plain = json.loads(run(*ask).stdout)
    done = run(*ask, "--drafter", "rest", "-o", f"datastore={store}", "-o", "min_match=1")
    assert done.exit_code == 0, done.output
    drafted = json.loads(done.stdout)
    assert drafted["requests"][0]["text"] == plain["requests"][0]["text"]


def test_parquet(run: Callable[..., Any], models: dict[str, str], tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    file, store = tmp_path / "a.parquet", tmp_path / "store"
    write_table(pyarrow.table({"body": ["one", None, "two"]}), file)
    build = ("datastore", "build", str(file), "-o", str(store), "--model", models["target"])
    assert run(*build, "--field", "body").exit_code == 0
    assert Datastore(store).num_tokens == 6
    refused = run(*build)
    assert refused.exit_code == 2 and "got columns body; expected 'text'; see --field" in refused.stderr


def test_bad_input(run: Callable[..., Any], models: dict[str, str], texts: Path, tmp_path: Path) -> None:
    def says(message: str, *arguments: str) -> None:
        done = run(*arguments)
        assert done.exit_code == 2 and message in done.stderr, (done.stderr, done.stdout)
        assert "Traceback" not in done.stderr

    store, broken, empty = tmp_path / "store", tmp_path / "broken.jsonl", tmp_path / "empty"
    broken.write_text('{"text": "a"}\n{"body": "b"}\n')
    empty.mkdir()
    (tmp_path / "nothing.txt").write_text("")
    build = ("datastore", "build", "--output", str(store), "--model", models["target"])
    says("broken.jsonl:2: expected a JSON object with text in 'text'; see --field", *build, str(broken))
    says("expected a file or a folder", *build, str(tmp_path / "gone"))
    says("no file in it ends in .txt", *build, str(empty))
    says("got no tokens", *build, str(tmp_path / "nothing.txt"))
    says("expected a model with a tokenizer", *build[:-1], models["bare"], str(texts))
    assert not store.exists()
    says("this is no datastore file", "datastore", "info", str(texts / "a.txt"))
    generate = ("generate", "a", "--model", models["target"], "--drafter", "rest")
    says("rest: got no datastore; expected datastore=PATH", *generate)
    run("datastore", "build", str(texts), "--output", str(store), "--model", models["stranger"])
    says("its tokens are those of another tokenizer", *generate, "-o", f"datastore={store}")
    store.write_bytes(store.read_bytes()[:-1])
    says("it was cut off; make it again", "datastore", "info", str(store))
