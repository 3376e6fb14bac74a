"""Words stay whole in terminals of any width: messages, `drafters`, `info` and `kernels list`."""

from __future__ import annotations

import dataclasses
import io
import re
import sys
from typing import Any, get_type_hints

import pytest

from specdec_fast.cli import main
from specdec_fast.commands import help_layout
from specdec_fast.commands.drafters import _TERMS, collect, needed
from specdec_fast.commands.word_wrap import wrap_words
from specdec_fast.interfaces import Needs
from specdec_kernels import OPS

NARROW = 40


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_help_is_a_plain_list(run: Any) -> None:
    text = run("generate", "--help", env={"COLUMNS": str(NARROW)}).stdout
    assert "…" not in text and "│" not in text and max(map(len, text.splitlines())) <= NARROW
    assert {"--no-repeat-ngram-size", "--no-fused-forward", "llguidance]", "demo-target]"} <= set(text.split())
    assert "│" in run("generate", "--help", env={"COLUMNS": "100"}).stdout


@pytest.mark.parametrize("columns", [str(NARROW), "100"])
@pytest.mark.parametrize("lacking", ["metavar", "param_type_name", "context_class"])
def test_help_without_what_another_release_of_typer_lacks(
    run: Any, monkeypatch: pytest.MonkeyPatch, lacking: str, columns: str
) -> None:
    class Without:
        """An object of typer, for the layout alone."""

        def __init__(self, inner: Any) -> None:
            self.__dict__["inner"] = inner

        def __getattr__(self, name: str) -> Any:
            if name == lacking:
                raise AttributeError(name)
            found = getattr(self.__dict__["inner"], name)
            return found if name != "get_params" else lambda context: map(Without, found(context))

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(self.__dict__["inner"], name, value)

    for name in ("_name_values", "_fit_width"):
        own = getattr(help_layout, name)
        monkeypatch.setattr(help_layout, name, lambda command, ctx, own=own: own(Without(command), ctx))
    result = run("generate", "--help", env={"COLUMNS": columns})
    assert result.exit_code == 0 and "Usage: specdec generate" in result.stdout
    is_table = columns == "100" or lacking == "context_class"
    assert ("│" in result.stdout) == is_table


def test_log_probabilities(run: Any, pair: list[str]) -> None:
    asked = ["generate", "ab", *pair, "--max-new-tokens", "2", "--seed", "1", "--logprobs", "1"]
    narrow = run(*asked, env={"COLUMNS": "30"}).stderr
    assert "…" not in narrow and narrow.count("log-probability") == 2


@pytest.mark.parametrize("command", [["drafters"], ["info"], ["kernels", "list"]])
def test_no_word_is_cut(run: Any, command: list[str]) -> None:
    wide = run(*command, env={"COLUMNS": "400"}).stdout
    narrow = run(*command, env={"COLUMNS": str(NARROW)}).stdout
    assert "…" not in narrow
    words = set(narrow.split())
    lost = {word for word in wide.split() if not re.fullmatch(r"[\W_]+", word)} - words
    assert lost <= {"operator", "backend", "all"} | {word for word in lost if len(word) > NARROW - 10}, lost
    assert [line for line in narrow.splitlines() if len(line) > NARROW and len(line.split()) > 2] == []
    if command != ["drafters"]:
        assert all(op in words for op in OPS)


def test_a_pipe_gets_one_line_per_entry(run: Any) -> None:
    (line,) = [line for line in run("drafters").stdout.splitlines() if line.startswith("layer_skip ")]
    assert line.endswith("(Zhang et al. 2023).") and len(line) > 110


def test_errors_break_between_words_in_terminals_alone(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["generate", "x", "--model", "/no/such/folder", "--max-new-tokens", "1"]
    whole = run(*asked, env={"COLUMNS": str(NARROW)}).stderr
    assert whole.count("\n") == 1, "a program reads it"
    monkeypatch.setenv("COLUMNS", str(NARROW))
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(SystemExit, match="2"):
        main(asked)
    narrow = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, narrow.splitlines())) <= NARROW and narrow.split() == whole.split()


def test_wrapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    text = "one two three four five: run `pip install -e '.[gguf]'` in /a/path/that-is-longer-than/the/whole/line"
    assert wrap_words(text, io.StringIO()) == wrap_words(text, None) == text, "a pipe, or nothing at all"
    assert wrap_words(text, Terminal()) == text, "no number of columns is known"


def test_commands_and_paths_stay_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    text = "one two three four five: run `pip install -e '.[gguf]'` in /a/path/that-is-longer-than/the/whole/line"
    assert wrap_words(text, Terminal(), indent=2).split("\n") == [
        "one two three four five: run",
        "  `pip install -e '.[gguf]'`",
        "  in",
        "  /a/path/that-is-longer-than/the/whole/line",
    ]
    assert wrap_words(text, None) == text and wrap_words(text, None, table=True).count("\n") == 2
    assert wrap_words("first\n\n  second", Terminal()) == "first\n\n  second"
    assert wrap_words("`a command that is longer than this line` ends", Terminal()).count("\n") == 1


def test_every_need_is_explained() -> None:
    kinds = get_type_hints(Needs)
    flags = {field.name: True for field in dataclasses.fields(Needs) if kinds[field.name] is bool}
    entry = {"takes_draft": True, "needs": {**flags, "topology": "tree", "aux_hidden_states": ("final_norm",)}}
    everything = re.sub(r"(hidden states) final_norm", r"\1", needed(entry))
    assert {words for words in everything.split(", ") if words != "trees"} <= set(_TERMS)
    assert {needed(each).split(", ")[0] for each in collect()} == {"chains", "trees"}


def test_the_legend_has_the_terms_that_are_used(run: Any) -> None:
    text = run("drafters").stdout
    assert "cross request: a draft may depend on the texts of other requests" in text
    assert "final_norm that of the projection" in text and "excludes siblings: " not in text
