"""Warnings of the library: words of the program, and a place below the text."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from specdec_fast.commands import warning_lines
from specdec_fast.commands.error_wording import in_flags
from specdec_fast.commands.open_engine import quiet
from specdec_fast.commands.warning_lines import warnings_after_text
from specdec_fast.engine import drafter_speed
from specdec_fast.engine.drafter_speed import DrafterSpeed

log = logging.getLogger("specdec_fast")


def test_warnings_and_errors_name_flags(capsys: pytest.CaptureFixture[str]) -> None:
    quiet()
    log.warning("try drafter auto, a smaller num_draft_tokens or budget goodput, or choose another drafter or none")
    words = "try --drafter auto, a smaller --draft-tokens or --budget goodput, or choose another drafter or none"
    assert words in " ".join(capsys.readouterr().err.split())
    error = ValueError("weights: got 'int8' on cuda; pass device='cpu'")
    assert in_flags(error) == "--weights: got 'int8' on cuda; pass --device cpu"
    assert in_flags(ValueError("pass device_map='cuda:0'")) == "pass --device-map cuda:0"
    for own in ("cannot read '/runs/dtype=bf16/a'", "messages: got 'budget=5'"):
        assert in_flags(ValueError(own)) == own, "what the user wrote stays"


def test_a_warning_waits_for_the_end_of_a_block(capsys: pytest.CaptureFixture[str]) -> None:
    quiet()
    with warnings_after_text():
        log.warning("slow")
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err == "specdec: warning: slow\n"
    with warnings_after_text():
        with warnings_after_text():
            log.warning("slow")
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err == "specdec: warning: slow\n"
    with pytest.raises(KeyboardInterrupt), warnings_after_text():
        log.warning("slow")
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "specdec: warning: slow\n"


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_texts_hold_warnings_back(
    run: Any, models: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    held: list[bool] = []
    monkeypatch.setattr(drafter_speed, "FIRST_WINDOW", 2)
    monkeypatch.setattr(DrafterSpeed, "compare", lambda *_: held.append(warning_lines._held is not None))
    template = tmp_path / "template"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    own = {"generate": ["Once upon"], "chat": ["--chat-template", str(template)]}[command]
    options = ["--model", models["target"], "--drafter", "ngram", "--seed", "7", "--ignore-eos"]
    result = run(command, *own, *options, "--max-new-tokens", "40", stdin="Once upon\n")
    assert result.exit_code == 0, result.stderr
    assert held and all(held)
