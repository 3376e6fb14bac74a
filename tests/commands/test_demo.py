"""`specdec demo` reports what it measured, as text and as JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

QUICK = ["--max-new-tokens", "12", "--prompts", "2", "--repeats", "1"]
NUMBERS = ("plain_tokens_per_s", "speculative_tokens_per_s", "tau", "alpha", "distinct_4")


def test_json(run: Any, pair: list[str]) -> None:
    result = run("demo", *pair, *QUICK, "--json", "--threads", "1")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert all(isinstance(report[name], float) for name in NUMBERS)
    assert report["identical"] is True
    assert report["identical_expected"] is True
    assert report["prompts"] == 2
    assert report["threads"] == 1
    assert report["dtype"] == "float32"
    assert report["rule"] == "replay"
    assert report["temperature"] == [0.0, 1.0]
    ratio = report["speculative_tokens_per_s"] / report["plain_tokens_per_s"]
    assert report["speedup"] == (pytest.approx(ratio) if report["speedup_doubt"] is None else None)
    assert [len(rounds) for rounds in report["speedup_rounds"]] == [1, 1, 1, 1]
    assert len(report["per_prompt"]) == 4
    assert [each["temperature"] for each in report["per_temperature"]] == [0.0, 1.0]
    for each in report["per_prompt"]:
        assert each["text"] == each["plain_text"]
        assert each["first_difference"] is None
        assert each["new_tokens"] <= 12 and each["prompt"]


def test_the_title_says_how_small_the_bundled_model_is() -> None:
    from specdec_fast.commands.demo_view import model_note

    assert model_note("demo-target") == "demo-target has only 6.8M parameters, so its text is not meaningful prose."
    assert model_note("some/model") == ""


def test_text(run: Any, pair: list[str]) -> None:
    result = run("demo", *pair, *QUICK, "--temperature", "0")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "\x1b" not in result.stdout
    assert "2 of 2 texts identical to plain decoding" in result.stdout
    for word in ("tau", "alpha", "distinct", "accepted", "recovered", "the end of the prompt, >>, what was written"):
        assert word in result.stdout
    assert result.stdout.count(" >> ") == 2, "a mark between each prompt and its text"


@pytest.mark.parametrize(("temperatures", "rule"), [(["0"], "greedy"), (["0", "1"], "block")])
def test_the_best_rule_follows_what_is_decoded(run: Any, pair: list[str], temperatures: list[str], rule: str) -> None:
    asked = [part for each in temperatures for part in ("--temperature", each)]
    result = run(
        "demo", *pair, "--max-new-tokens", "4", "--prompts", "1", "--repeats", "1", *asked, "--rule", "best", "--json"
    )
    assert json.loads(result.stdout)["rule"] == rule


def test_a_text_that_breaks_the_promise_fails_the_command(run: Any, pair: list[str], monkeypatch: Any) -> None:
    from specdec_fast.commands.demo_comparison import Comparison

    monkeypatch.setattr(Comparison, "identical", property(lambda _: False))
    result = run("demo", *pair, *QUICK, "--temperature", "0", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["identical"] is False
    assert "differs from plain decoding" in result.stderr
    assert (
        run("demo", *pair, *QUICK, "--temperature", "1", "--rule", "rejection").exit_code == 0
    )  # nothing was promised


def test_an_interrupt_keeps_finished_texts(run: Any, pair: list[str], monkeypatch: Any) -> None:
    from specdec_fast.commands.demo_comparison import Comparer

    compare = Comparer.compare

    def interrupted(after: int) -> Any:
        def some(self: Comparer, *args: Any) -> Any:
            for _, comparison in zip(range(after), compare(self, *args), strict=False):
                yield comparison
            raise KeyboardInterrupt

        return some

    for after in (0, 1):
        monkeypatch.setattr(Comparer, "compare", interrupted(after))
        result = run("demo", *pair, *QUICK, "--temperature", "0", "--json")
        assert result.exit_code == 130 and f"interrupted after {after} of 2 texts" in result.stderr
        report = json.loads(result.stdout)
        assert [name for name in NUMBERS if (report[name] is None) == (after == 1)] == []
        assert report["prompts"] == len(report["per_prompt"]) == after


def test_texts_that_differ_are_both_printed(run: Any, pair: list[str]) -> None:
    """Under a rule that samples, other uniforms give another text of the same distribution."""
    result = run("demo", *pair, *QUICK, "--temperature", "1", "--rule", "rejection")
    assert result.exit_code == 0, result.output
    assert "plain decoding:" in result.stdout
    same = run("demo", *pair, *QUICK, "--temperature", "1")
    assert "plain decoding:" not in same.stdout


def test_colours_and_legend(run: Any, pair: list[str]) -> None:
    result = run("demo", *pair, *QUICK, "--temperature", "0", env={"FORCE_COLOR": "1", "TERM": "xterm"})
    assert "\x1b[32m" in result.stdout
    assert "the target agreed" in result.stdout


def test_a_rule_that_keeps_only_the_distribution(run: Any, pair: list[str]) -> None:
    options = [
        *pair,
        "--max-new-tokens",
        "24",
        "--prompts",
        "1",
        "--repeats",
        "1",
        "--rule",
        "rejection",
        "-T",
        "1",
    ]
    report = json.loads(run("demo", *options, "--json").stdout)
    assert report["identical_expected"] is False
    shown = run("demo", *options).stdout
    assert report["identical"] is False and "same distribution" in shown


def test_a_lossy_rule_promises_nothing(run: Any, pair: list[str]) -> None:
    options = ["--max-new-tokens", "16", "--prompts", "1", "--repeats", "1", "--rule", "lossy:among=6", "-T", "0"]
    result = run("demo", *pair, *options)
    assert (
        "another distribution, " in result.stdout and "same distribution" not in result.stdout and result.exit_code == 0
    )


def test_a_context_that_is_too_short_is_noted(run: Any, pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_fast.commands.demo import _Measurement

    monkeypatch.setattr(_Measurement, "run", lambda *_: None)
    options = ["--max-new-tokens", "5000", "--prompts", "1", "--temperature", "0"]
    words = r"--max-new-tokens 5000 after a prompt of \d+ tokens: the context of 2048 ends the text before"
    assert re.fullmatch(f"specdec: note: {words}\n", run("demo", *pair, *options).stderr)


def test_one_prompt_of_each_kind(run: Any, pair: list[str]) -> None:
    options = ["--max-new-tokens", "2", "--repeats", "1", "--temperature", "0", "--json"]
    report = json.loads(run("demo", *pair, *options).stdout)
    kinds = [each["kind"] for each in report["per_prompt"]]
    assert len(kinds) == len(set(kinds)) == 4
