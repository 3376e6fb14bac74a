"""`specdec generate`: the text is the engine's, in every form it can be asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec_fast import SamplingParams, load

SAMPLING = ["--seed", "7", "--max-new-tokens", "40", "--ignore-eos"]


@pytest.fixture(scope="module")
def expected(models: dict[str, str]) -> str:
    engine = load(models["target"], max_rows=1)
    params = SamplingParams(seed=7, max_new_tokens=40, ignore_eos=True)
    return engine.generate(["Once upon"], params)[0].text


def test_streams_the_engines_text(run: Any, pair: list[str], expected: str) -> None:
    result = run("generate", "Once upon", *pair, *SAMPLING)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout == expected + "\n"


@pytest.mark.parametrize("extra", [["--draft-tokens", "0"], ["--drafter", "none"], ["--drafter", "ngram"]])
def test_same_text_whoever_drafts(run: Any, models: dict[str, str], expected: str, extra: list[str]) -> None:
    result = run("generate", "Once upon", "--model", models["target"], *SAMPLING, *extra)
    assert result.stdout == expected + "\n"


def test_prompt_from_stdin_and_files(run: Any, pair: list[str], expected: str, tmp_path: Path) -> None:
    text = tmp_path / "prompt.txt"
    text.write_text("Once upon\n")
    assert run("generate", *pair, *SAMPLING, stdin="Once upon\n").stdout == expected + "\n"
    assert run("generate", "--file", "-", *pair, *SAMPLING, stdin="Once upon").stdout == expected + "\n"
    assert run("generate", "--file", str(text), *pair, *SAMPLING).stdout == expected + "\n"


@pytest.mark.parametrize(
    ("name", "content", "flags"),
    [
        ("p.txt", "Once upon\n\nHello\n", ["--lines"]),
        ("p.json", '["Once upon", {"prompt": "Hello"}]', []),
        ("p.jsonl", '{"id": 1, "prompt": "Once upon"}\n"Hello"\n', []),
    ],
)
def test_several_prompts(
    run: Any, pair: list[str], expected: str, tmp_path: Path, name: str, content: str, flags: list[str]
) -> None:
    (tmp_path / name).write_text(content)
    result = run("generate", "--file", str(tmp_path / name), *flags, *pair, *SAMPLING, "--json")
    assert result.exit_code == 0
    requests = json.loads(result.stdout)["requests"]
    assert [request["prompt"] for request in requests] == ["Once upon", "Hello"]
    assert requests[0]["text"] == expected
    shown = run("generate", "--file", str(tmp_path / name), *flags, *pair, *SAMPLING).stdout
    assert "1: Once upon [length]" in shown
    assert expected in shown
    assert requests[1]["text"] in shown


def test_one_bad_prompt_does_not_stop_the_others(run: Any, pair: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(["x" * 3000, "Once upon"]))
    result = run("generate", "--file", str(tmp_path / "p.json"), *pair, *SAMPLING)
    assert result.exit_code == 2
    assert expected in result.stdout
    assert "prompt 1: prompt: got 3000 tokens" in result.stderr


def test_json(run: Any, pair: list[str], expected: str) -> None:
    result = run("generate", "Once upon", *pair, *SAMPLING, "--json", "--stats")
    report = json.loads(result.stdout)
    assert report["rule"] == "replay"
    assert report["drafter"] == "draft_model"
    assert report["new_tokens"] == 40
    assert report["tokens_per_s"] > 0
    assert set(report["versions"]) == {"python", "specdec-fast", "torch", "transformers", "triton"}
    (request,) = report["requests"]
    assert request["text"] == expected
    assert request["finish_reason"] == "length"
    assert request["seed"] == 7
    assert len(request["tokens"]) == len(request["origins"]) == 40
    assert set(request["origins"]) <= {"accepted", "recovered", "bonus", "plain"}
    assert request["stats"]["tau"] > 1
    assert "alpha" in result.stderr
    assert "score" in result.stderr


def test_stop_strings(run: Any, pair: list[str], expected: str) -> None:
    stop = expected[10:12]
    result = run("generate", "Once upon", *pair, *SAMPLING, "--stop", stop)
    assert result.stdout == expected[: expected.index(stop)] + "\n"


def test_stop_understands_a_new_line(run: Any, pair: list[str], expected: str) -> None:
    result = run("generate", "Once upon", *pair, *SAMPLING, "--stop", "\\n")
    assert result.stdout == expected + "\n"  # these models know no new line


def test_token_ids_without_a_tokenizer(run: Any, models: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[5, 6, 7]")
    options = ["--model", models["bare"], "--draft", models["draft"], *SAMPLING]
    result = run("generate", "--file", str(tmp_path / "ids.json"), *options)
    report = json.loads(run("generate", "--file", str(tmp_path / "ids.json"), *options, "--json").stdout)
    assert [int(word) for word in result.stdout.split()] == report["requests"][0]["tokens"]


def test_colours_only_when_they_can_be_seen(run: Any, pair: list[str], expected: str) -> None:
    piped = run("generate", "Once upon", *pair, *SAMPLING, "--color")
    assert piped.stdout == expected + "\n"
    assert "not a terminal" in piped.stderr
    forced = run("generate", "Once upon", *pair, *SAMPLING, "--color", env={"FORCE_COLOR": "1"})
    assert "\x1b[32m" in forced.stdout
    unwanted = run("generate", "Once upon", *pair, *SAMPLING, "--color", env={"FORCE_COLOR": "1", "NO_COLOR": "1"})
    assert "\x1b" not in unwanted.stdout
