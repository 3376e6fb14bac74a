"""Options that say how the target is loaded: they reach `load` from every command that has them, or are refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from oracles import models
from typer.testing import CliRunner

from specdec_fast import loading
from specdec_fast.cli import main
from specdec_fast.commands import open_engine
from specdec_fast.commands.error_wording import in_flags


@pytest.mark.parametrize("command", [["generate", "a"], ["chat"], ["serve"]])
def test_options_reach_the_loader(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if command == ["serve"]:
        pytest.importorskip("fastapi")
        command = ["serve", "--port", "0"]
    found: dict[str, Any] = {}

    def load(target: str, *_: object, **options: Any) -> None:
        found.update(options, target=target)
        raise ValueError("that is enough")

    monkeypatch.setattr(loading, "load", load)
    places = '{"": "cpu"}'
    options = ["--adapter", "an/adapter", "--revision", "v1", "--trust-remote-code", "--device-map", places]
    options += ["--weights", "int8"]
    result = CliRunner().invoke(main, [*command, "--model", "a/model", *options])
    assert result.exit_code == 2 and "that is enough" in result.stderr
    assert "looking for a/model and an/adapter on the hub" in result.stderr
    wanted = {"adapter": "an/adapter", "revision": "v1", "trust_remote_code": True, "device_map": {"": "cpu"}}
    wanted["weights"] = "int8"
    assert {name: found[name] for name in wanted} == wanted and found["target"] == "a/model"


def test_limits_of_a_server_reach_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    found: dict[str, Any] = {}

    def load(*_: object, **options: Any) -> None:
        found.update(options)
        raise ValueError("that is enough")

    monkeypatch.setattr(loading, "load", load)
    limits = ["--max-rows", "3", "--max-length", "64", "--prefill-chunk", "7"]
    result = CliRunner().invoke(main, ["serve", "--port", "0", "--model", "a/model", *limits])
    assert result.exit_code == 2 and "that is enough" in result.stderr
    assert (found["max_rows"], found["max_length"], found["prefill_chunk"]) == (3, 64, 7)


def test_the_report_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, file = loading.load, tmp_path / "ids.json"
    file.write_text("[[5, 6]]")
    monkeypatch.setattr(loading, "load", lambda *_, **__: own(models.own("llama"), max_length=64))
    options = ["--device-map", "auto", "--revision", "v1", "--max-new-tokens", "2", "--json"]
    result = CliRunner().invoke(main, ["generate", "--file", str(file), "--model", "a/model", *options])
    report = json.loads(result.stdout)
    assert (report["device_map"], report["revision"], report["adapter"]) == ("auto", "v1", None)


@pytest.mark.parametrize(("shown", "said"), [(True, "specdec: note: loading x\n"), (False, "")])
def test_a_slow_load_says_so_on_a_terminal(
    shown: bool, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(open_engine, "_PATIENCE", 0.0)
    monkeypatch.setattr(open_engine.sys.stderr, "isatty", lambda: shown)
    with open_engine.note_if_slow("loading x"):
        time.sleep(0.1)
    monkeypatch.setattr(open_engine, "_PATIENCE", 60.0)
    with open_engine.note_if_slow("loading y"):
        pass
    assert capsys.readouterr().err == said


def test_a_device_map_that_is_no_json() -> None:
    result = CliRunner().invoke(main, ["generate", "a", "--device-map", "{broken"])
    assert result.exit_code == 2
    assert (
        "--device-map: got '{broken'; expected auto, a device, or a JSON object of devices by module" in result.stderr
    )


def test_errors_name_flags(tmp_path: Path) -> None:
    config = {"model_type": "own", "auto_map": {"AutoConfig": "a.B", "AutoModelForCausalLM": "a.C"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "a.py").write_text("class B: pass\nclass C: pass\n")
    result = CliRunner().invoke(main, ["generate", "a", "--model", str(tmp_path)])
    assert result.exit_code == 2 and "--model: got" in result.stderr
    assert "expected --trust-remote-code, which runs that code" in result.stderr
    assert in_flags("adapter: got 'x', a LORA adapter").startswith("--adapter: got 'x'")
    assert in_flags("device_map: got 'x' for 'y'").startswith("--device-map: got 'x'")
