"""The folder `custom_generate/`, as an argument of `generate` and inside of a model's folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.transformers.conftest import TARGET, load_target

from specdec_fast.integrations.transformers import (
    attach,
    attached,
    detach,
    generate_attached,
    write_custom_generate,
)

GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(autouse=True)
def own_module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers copies code of repositories to a cache, here to one of this test."""
    import transformers.dynamic_module_utils as modules

    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with its own generate."""
    shutil.copytree(TARGET, tmp_path / "model")
    write_custom_generate(tmp_path / "model", draft="demo-draft", num_draft_tokens=3)
    return tmp_path / "model"


def test_a_folder_as_an_argument(folder: Path, stock: Any, one: Any, tokenizer: Any) -> None:
    model = load_target()
    given = {**GREEDY, "custom_generate": str(folder), "trust_remote_code": True}
    expected = stock.generate(**one, **GREEDY)
    assert torch.equal(model.generate(**one, **given), expected)
    engine = attached(model).engine
    assert engine.drafter.num_draft_tokens == 3  # type: ignore[union-attr]
    more = {"stop_strings": [" the"], "tokenizer": tokenizer}
    assert torch.equal(model.generate(**one, **given, **more), stock.generate(**one, **GREEDY, **more))
    assert attached(model).engine is engine, "every call built an engine"
    assert torch.equal(model.generate(**one, **GREEDY), expected), "without the folder transformers generates"
    detach(model)
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(**one, custom_generate=str(folder), trust_remote_code=False)


def test_a_model_s_folder(folder: Path, stock: Any, one: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    own, expected = model.generate, stock.generate(**one, **GREEDY)
    assert torch.equal(model.generate(one.input_ids, **GREEDY), expected)  # also without names
    assert torch.equal(model.generate(**one, num_beams=2, **GREEDY), stock.generate(**one, num_beams=2, **GREEDY))
    assert attached(model).engine.stats.steps > 0
    detach(model)
    assert model.generate is own
    attach(model, drafter="ngram")
    assert torch.equal(model.generate(**one, **GREEDY), expected)
    assert detach(model).generate is own


def test_an_attached_model_uses_its_own_engine(stock: Any, one: Any, drafted: Any) -> None:
    engine = attached(drafted).engine
    found = generate_attached(drafted, {"drafter": "ngram"}, **one, **GREEDY)
    assert torch.equal(found, stock.generate(**one, **GREEDY))
    assert attached(drafted).engine is engine


def test_options_that_a_file_cannot_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected numbers, texts, lists and dicts; pass"):
        write_custom_generate(tmp_path, draft=torch.nn.Linear(1, 1))
    assert not list(tmp_path.iterdir())


def test_files(tmp_path: Path) -> None:
    written = write_custom_generate(tmp_path / "new", draft=Path("/models/small"), rule="block", fallback=None)
    assert {file.name for file in written.iterdir()} == {"generate.py", "requirements.txt"}
    program = (written / "generate.py").read_text()
    assert "OPTIONS: dict[str, Any] = {'draft': '/models/small', 'rule': 'block', 'fallback': None}" in program
    assert (written / "requirements.txt").read_text().split() == ["specdec-fast"]
