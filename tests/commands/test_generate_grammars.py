"""`specdec generate` under a grammar, by each library that makes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a byte-level tokenizer: grammar libraries read those."""
    from oracles.toy_tokenizer import byte_tokenizer

    from specdec_fast.targets.tiny_models import tiny_model

    folder, tokenizer = tmp_path_factory.mktemp("bytes"), byte_tokenizer()
    tiny_model("llama", vocab_size=272, eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_grammars(run: Any, bytes_model: str, tmp_path: Path, backend: str) -> None:
    pytest.importorskip(backend)
    options = ["--model", bytes_model, "--drafter", "ngram", "--seed", "7", "--max-new-tokens", "60"]
    options += ["--grammar-backend", backend]
    text = run("generate", "Once upon", *options, "--regex", "[0-9]{4}-[A-F]{2}").stdout
    assert re.fullmatch(r"[0-9]{4}-[A-F]{2}\n", text)
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    (tmp_path / "s.json").write_text(json.dumps(schema))
    for given in (json.dumps(schema), str(tmp_path / "s.json")):
        found = json.loads(run("generate", "Once upon", *options, "--json-schema", given).stdout)
        assert found.keys() == {"a"} and found["a"] in ("x", "yy")


def test_a_bad_regex_is_one_line(run: Any, bytes_model: str) -> None:
    pytest.importorskip("llguidance")
    result = run("generate", "Once upon", "--model", bytes_model, "--regex", "[a")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("specdec: error: regex '[a': unclosed character class; expected a regular")


def test_a_tokenizer_that_the_grammar_library_cannot_read_is_refused(run: Any, pair: list[str]) -> None:
    pytest.importorskip("llguidance")
    result = run("generate", "Once upon", *pair, "--regex", "a")
    assert result.exit_code == 2 and "grammar: llguidance cannot read this tokenizer" in result.stderr
