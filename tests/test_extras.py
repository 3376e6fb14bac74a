"""What is missing is named with its remedy, before any work is done, and every extra is one of pyproject.toml."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec_fast.extras import EXTRAS, require


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require("lab", "lab")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = "lab: matplotlib is not installed; expected the extra 'lab'; run `pip install -e '.[lab]'`"
    with pytest.raises(ValueError, match=re.escape(words)):
        require("lab", "lab")
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ValueError, match="lab: scipy, matplotlib are not installed"):
        require("lab", "lab")
    require("lab", "lab", "jinja2")


@pytest.mark.parametrize("extra", EXTRAS)
def test_extras_are_those_of_the_package(extra: str) -> None:
    (listed,) = re.findall(
        rf"^{extra} = \[(.*)\]$", (Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"), flags=re.MULTILINE
    )
    assert set(EXTRAS[extra]) <= {name.replace("-", "_") for name in re.findall(r'"([a-z0-9-]+)', listed)}


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        (["lab", "--out", "report"], "matplotlib", "lab"),
        (["lab", "--out", "report"], "jinja2", "lab"),
        (["tune", "layers"], "optuna", "tune"),
        (["tune", "layers", "--method", "similarity"], "matplotlib", "tune"),
        (["train", "medusa"], "accelerate", "train"),
        (["train", "eagle"], "matplotlib", "train"),
        (["generate", "a", "--regex", "a"], "llguidance", "grammar"),
        (["generate", "a", "--json-schema", "{}"], "llguidance", "grammar"),
        (["generate", "a", "--json-schema", "{}", "--grammar-backend", "xgrammar"], "xgrammar", "xgrammar"),
        (["datastore", "build", "a.txt", "b.parquet", "--output", "c.store"], "pyarrow", "datastore"),
        (["kernels", "inspect"], "triton", "gpu"),
        (["serve"], "fastapi", "serve"),
        (["serve"], "prometheus_client", "serve"),
    ],
)
def test_commands_look_for_it_first(
    command: list[str], package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line and status 2, before a model is loaded."""
    from typer.testing import CliRunner

    from specdec_fast import loading
    from specdec_fast.cli import main

    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.parquet"):
        (tmp_path / name).write_text("text")
    loads: Callable[..., None] = lambda *_, **__: pytest.fail("a model was loaded first")  # noqa: E731
    for name in ("load", "load_model", "load_tokenizer"):
        monkeypatch.setattr(loading, name, loads)
    monkeypatch.setitem(sys.modules, package, None)
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1, result.output
    assert f"{package} is not installed" in result.stderr and f"pip install -e '.[{extra}]'" in result.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.txt", "b.parquet"]
