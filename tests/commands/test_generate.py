"""`specdec generate`: the text is the engine's, in every output format."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_fast import SamplingParams, load
from specdec_fast.commands.generate_batch import busy_machine
from specdec_fast.commands.prompts import unescape
from specdec_fast.engine.engine import Engine

SAMPLING = ["--seed", "7", "--max-new-tokens", "40", "--ignore-eos"]


@pytest.fixture(scope="module")
def expected(models: dict[str, str]) -> str:
    engine = load(models["target"], drafter="none", max_rows=1)
    params = SamplingParams(seed=7, max_new_tokens=40, ignore_eos=True)
    return engine.generate(["Once upon"], params)[0].text


def test_streams_the_engines_text(run: Any, pair: list[str], expected: str) -> None:
    result = run("generate", "Once upon", *pair, *SAMPLING)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout == expected + "\n"


@pytest.mark.parametrize(
    "extra",
    [["--draft-tokens", "0"], ["--drafter", "none"], ["--drafter", "ngram", "-o", "n_max=3"]],
)
def test_same_text_with_any_drafter(run: Any, models: dict[str, str], expected: str, extra: list[str]) -> None:
    result = run("generate", "Once upon", "--model", models["target"], *SAMPLING, *extra)
    assert result.stdout == expected + "\n"


@pytest.mark.parametrize(("options", "drafter"), [([], "auto"), (["--drafter", "none"], None), (["-k", "0"], None)])
def test_auto_drafts_unless_told_otherwise(
    run: Any, models: dict[str, str], options: list[str], drafter: str | None, expected: str
) -> None:
    result = run("generate", "Once upon", "--model", models["target"], *SAMPLING, "--json", "--stats", *options)
    report = json.loads(result.stdout)
    assert report["drafter"] == drafter and report["requests"][0]["text"] == expected
    assert ("auto: none was named, and no draft model was given" in result.stderr) == (drafter is not None)


def test_same_text_from_trees(run: Any, pair: list[str], expected: str) -> None:
    result = run("generate", "Once upon", *pair, "--drafter", "draft_tree", "-o", "widths=[3,2]", *SAMPLING)
    assert result.stdout == expected + "\n"
    result = run("generate", "Once upon", *pair, "--budget", "goodput", *SAMPLING)
    assert result.stdout == expected + "\n"


def test_prompt_from_stdin_and_files(run: Any, pair: list[str], expected: str, tmp_path: Path) -> None:
    text = tmp_path / "prompt.txt"
    text.write_text("Once upon\n")
    assert run("generate", *pair, *SAMPLING, stdin="Once upon\n").stdout == expected + "\n"
    assert run("generate", "--file", "-", *pair, *SAMPLING, stdin="Once upon").stdout == expected + "\n"
    marked = tmp_path / "marked.txt"
    marked.write_text("Once upon", encoding="utf-8-sig")  # as Windows does
    assert run("generate", "--file", str(marked), *pair, *SAMPLING).stdout == expected + "\n"
    assert run("generate", *pair, *SAMPLING, stdin=marked.read_text(encoding="utf-8")).stdout == expected + "\n"
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


def test_prompts_set_parameters_of_their_own(run: Any, pair: list[str], models: dict[str, str], tmp_path: Path) -> None:
    own = {"seed": 3, "max_new_tokens": 9, "logit_bias": {"40": 4.5}, "stop": "~", "logprobs": 0}
    lines = [{"prompt": "Once upon", "id": "first", **own}, {"prompt": "Hello", "temperature": 0}, "Hello"]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    result = run("generate", "--file", str(tmp_path / "p.jsonl"), *pair, *SAMPLING, "--json")
    requests = json.loads(result.stdout)["requests"]
    flags: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
    params = [
        SamplingParams(**flags | own | {"logit_bias": {40: 4.5}}),
        SamplingParams(temperature=0, seed=8, **flags),
        SamplingParams(seed=9, **flags),
    ]
    wanted = load(models["target"], max_rows=3).generate(["Once upon", "Hello", "Hello"], params)
    assert [each["tokens"] for each in requests] == [each.tokens for each in wanted]
    assert [each["seed"] for each in requests] == [3, 8, 9] and len(requests[0]["logprobs"]) == 9
    assert [each.get("id") for each in requests] == ["first", None, None]


def test_equal_prompts_have_seeds_of_their_own(run: Any, pair: list[str], expected: str) -> None:
    report = run("generate", *pair, *SAMPLING, "--lines", "--json", stdin="Once upon\nOnce upon\n").stdout
    first, second = json.loads(report)["requests"]
    assert first["text"] == expected != second["text"] and second["seed"] == 8
    assert run("generate", "Once upon", *pair, *SAMPLING, "--seed", "8").stdout == second["text"] + "\n"


def test_a_context_that_is_too_short_is_noted(run: Any, pair: list[str], expected: str) -> None:
    long = run("generate", "Once upon", *pair, *SAMPLING, "--max-length", "999999")
    assert long.stdout == expected + "\n"
    assert long.stderr == "specdec: warning: max_length: got 999999; the model's limit is 2048, and that is used\n"
    short = run("generate", "Once upon", *pair, *SAMPLING, "--max-length", "12")
    assert short.stdout == expected[:3] + "\n"
    words = "--max-new-tokens 40 after a prompt of 9 tokens: the context of 12 ends the text before (see --max-length)"
    assert short.stderr == f"specdec: note: {words}\n"
    assert "after a prompt of 1 token: the" in run("generate", "O", *pair, *SAMPLING, "--max-length", "12").stderr


def test_an_interrupted_batch_shows_started_texts(
    run: Any, pair: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("Once upon\n" * 11)
    step, left = Engine.step, iter(range(3))

    def few(engine: Engine) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", few)
    result = run("generate", "--file", str(tmp_path / "p.txt"), "--lines", *pair, *SAMPLING)
    assert result.exit_code == 130
    headings = [line for line in result.stdout.splitlines() if line.startswith("── ")]
    assert headings == [f"── {at}: Once upon [cancelled]" for at in range(1, 9)]
    assert re.fullmatch(
        r"specdec: interrupted after [1-9]\d* tokens; 3 of 11 prompts were not started\n", result.stderr
    )


def test_several_prompts_have_a_progress_bar_on_a_terminal(run: Any, pair: list[str], expected: str) -> None:
    several = ["generate", *pair, *SAMPLING, "--lines"]
    shown = run(*several, stdin="Once upon\nHello\n", env={"FORCE_COLOR": "1"})
    assert "prompts" in shown.stderr and "100%" in shown.stderr
    assert expected in shown.stdout and "prompts" not in shown.stdout
    assert run(*several, stdin="Once upon\nHello\n").stderr == ""
    assert run("generate", "Once upon", *pair, *SAMPLING, env={"FORCE_COLOR": "1"}).stderr == ""


def test_one_bad_prompt_does_not_stop_the_others(run: Any, pair: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(["x" * 3000, "Once upon"]))
    result = run("generate", "--file", str(tmp_path / "p.json"), *pair, *SAMPLING, "--seed", "6")
    assert result.exit_code == 2
    assert expected in result.stdout
    assert "prompt 1: prompt: got 3000 tokens" in result.stderr


@pytest.mark.parametrize("empty", ['""', "[]", '{"prompt": ""}'])
def test_an_empty_prompt_among_several_is_refused_alone(
    run: Any, pair: list[str], expected: str, tmp_path: Path, empty: str
) -> None:
    (tmp_path / "p.jsonl").write_text(f'"Once upon"\n{empty}\n')
    result = run("generate", "--file", str(tmp_path / "p.jsonl"), *pair, *SAMPLING)
    assert result.exit_code == 2 and expected in result.stdout
    assert "p.jsonl, line 2: prompt: got " in result.stderr and result.stderr.count("\n") == 1


def test_json(run: Any, pair: list[str], expected: str) -> None:
    result = run("generate", "Once upon", *pair, *SAMPLING, "--json", "--stats")
    report = json.loads(result.stdout)
    assert report["rule"] == "replay" and report["interrupted"] is False
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


@pytest.mark.parametrize(
    ("threads", "load", "flags", "noted"),
    [
        ("2", 4.5, ["--stats"], True),
        ("2", 4.0, ["--stats"], False),
        ("1", 4.5, ["--stats"], False),
        ("2", 4.5, [], False),
        ("2", 4.5, ["--stats", "--json"], False),
    ],
)
def test_stats_of_several_threads_on_a_busy_machine_have_advice(
    run: Any,
    pair: list[str],
    monkeypatch: pytest.MonkeyPatch,
    threads: str,
    load: float,
    flags: list[str],
    noted: bool,
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    before = torch.get_num_threads()
    try:
        result = run("generate", "Once upon", *pair, *SAMPLING, "--threads", threads, *flags)
    finally:
        torch.set_num_threads(before)
    advice = "specdec: note: the machine is busy (load average 4.5, cores: 4); --threads 1 is often faster then\n"
    assert result.exit_code == 0
    assert result.stderr.endswith(advice) == noted and ("busy" in result.output) == noted


def test_no_advice_without_a_load_average(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.getloadavg")
    assert busy_machine(8) is None


def test_stop_strings(run: Any, pair: list[str], expected: str) -> None:
    stop = expected[10:12]
    result = run("generate", "Once upon", *pair, *SAMPLING, "--stop", stop)
    assert result.stdout == expected[: expected.index(stop)] + "\n"


def test_without_the_extension_the_text_is_the_same(pair: list[str], expected: str) -> None:
    """As on a machine without a compiler: the references serve, and one line says so for all of them."""
    hide = "import sys; sys.modules['specdec_kernels._C'] = None\nfrom specdec_fast.cli import main\nmain()"
    command = [sys.executable, "-c", hide, "generate", "Once upon", *pair, *SAMPLING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected + "\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "specdec: warning: operators run on their slow PyTorch references: extension specdec_kernels._C"
    )
    assert "not built; build it with" in line and line.endswith("; `specdec info` lists them")


def test_stop_understands_a_new_line(run: Any, pair: list[str], expected: str) -> None:
    result = run("generate", "Once upon", *pair, *SAMPLING, "--stop", "\\n")
    assert result.stdout == expected + "\n"  # these models know no new line
    assert [unescape(text) for text in ("\\n\\n", "a\\tb", "\\\\n", "plain")] == ["\n\n", "a\tb", "\\n", "plain"]


def test_token_ids_without_a_tokenizer(run: Any, models: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[5, 6, 7]")
    options = ["--model", models["bare"], "--draft", models["draft"], *SAMPLING]
    result = run("generate", "--file", str(tmp_path / "ids.json"), *options)
    report = json.loads(run("generate", "--file", str(tmp_path / "ids.json"), *options, "--json").stdout)
    assert [int(word) for word in result.stdout.split()] == report["requests"][0]["tokens"]
    assert result.stderr == ""


def test_a_draft_without_a_tokenizer_is_noted(run: Any, models: dict[str, str], expected: str) -> None:
    result = run("generate", "Once upon", "--model", models["target"], "--draft", models["bare"], *SAMPLING)
    assert result.stdout == expected + "\n"
    note = f"--draft {models['bare']} has no tokenizer; the target's is assumed"
    assert result.stderr == f"specdec: note: {note}\n"


def test_the_greedy_rule_is_greedy_by_itself(run: Any, pair: list[str]) -> None:
    greedy = run("generate", "Once upon", *pair, *SAMPLING, "--temperature", "0").stdout
    assert run("generate", "Once upon", *pair, *SAMPLING, "--rule", "greedy").stdout == greedy


def test_an_interrupt_while_models_load_is_json_too(run: Any, pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec_fast.loading.load", interrupted)
    result = run("generate", "Once upon", *pair, *SAMPLING, "--json")
    assert result.exit_code == 130 and result.stderr == "specdec: interrupted\n"
    report = json.loads(result.stdout)
    assert report["interrupted"] is True and report["requests"] == [] and report["new_tokens"] == 0
    assert report["model"] == pair[1] and report["rule"] == "replay"
    assert run("generate", "Once upon", *pair, *SAMPLING).stdout == ""


def test_colours_only_when_they_can_be_seen(run: Any, pair: list[str], expected: str) -> None:
    piped = run("generate", "Once upon", *pair, *SAMPLING, "--color")
    assert piped.stdout == expected + "\n"
    assert "not a terminal" in piped.stderr
    forced = run("generate", "Once upon", *pair, *SAMPLING, "--color", env={"FORCE_COLOR": "1"})
    assert "\x1b[32m" in forced.stdout
    unwanted = run("generate", "Once upon", *pair, *SAMPLING, "--color", env={"FORCE_COLOR": "1", "NO_COLOR": "1"})
    assert "\x1b" not in unwanted.stdout


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        (["--repetition-penalty", "1.5"], {"repetition_penalty": 1.5}),
        (["--presence-penalty", "1.5"], {"presence_penalty": 1.5}),
        (["--frequency-penalty", "-1.25"], {"frequency_penalty": -1.25}),
        (["--logit-bias", "40:4.5", "--logit-bias", "41:-1"], {"logit_bias": {40: 4.5, 41: -1.0}}),
        (["--ban", "BANNED", "--ban", "51"], {"banned_token_ids": ("BANNED", 51)}),
        (["--no-repeat-ngram-size", "1"], {"no_repeat_ngram_size": 1}),
        (["--bad-word", "e", "--bad-word", "t"], {"bad_words": ("e", "t")}),
    ],
    ids=lambda value: value[0][2:] if isinstance(value, list) else "",
)
def test_penalties_bias_and_bans_reach_the_engine(
    run: Any, pair: list[str], models: dict[str, str], expected: str, flags: list[str], changes: dict[str, Any]
) -> None:
    engine = load(models["target"], max_rows=1)
    (first,) = engine.tokenizer.encode(expected[0])
    flags = [flag.replace("BANNED", str(first)) for flag in flags]
    if "banned_token_ids" in changes:
        changes = {"banned_token_ids": (first, 51)}
    params = SamplingParams(seed=7, max_new_tokens=40, ignore_eos=True, **changes)
    want = engine.generate(["Once upon"], params)[0].text
    assert want != expected
    assert run("generate", "Once upon", *pair, *SAMPLING, *flags).stdout == want + "\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--logit-bias", "40"], "--logit-bias: got '40'; expected ID:VALUE"),
        (["--logit-bias", "a:1"], "--logit-bias: got 'a:1'; expected ID:VALUE"),
        (["--ban", "5000"], "error: --ban: got 5000; expected ids below"),
        (["--no-repeat-ngram-size", "-1"], "error: --no-repeat-ngram-size: got -1; expected a positive integer"),
        (["--bad-word", ""], "error: --bad-word: got ('',); expected words that are not empty"),
        (["--repetition-penalty", "0"], "error: --repetition-penalty: got 0.0; expected"),
        (["--regex", "a", "--grammar-backend", "outlines"], "--grammar-backend: got 'outlines'; expected one of"),
        (["--regex", "a", "--json-schema", "{}"], "--regex with --json-schema: got both; expected one of them"),
        (["--json-schema", "nowhere.json"], "--json-schema: got 'nowhere.json', which is no file; expected a file"),
    ],
)
def test_bad_limits_are_one_line(run: Any, pair: list[str], flags: list[str], message: str) -> None:
    result = run("generate", "Once upon", *pair, *SAMPLING, *flags)
    assert result.exit_code == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1


def test_logprobs_in_both_forms(run: Any, pair: list[str], expected: str) -> None:
    report = json.loads(run("generate", "Once upon", *pair, *SAMPLING, "--logprobs", "2", "--json").stdout)
    (request,) = report["requests"]
    assert [each["token"] for each in request["logprobs"]] == request["tokens"]
    assert all(each["logprob"] <= 0 and len(each["top"]) == 2 for each in request["logprobs"])
    assert "".join(each["text"] for each in request["logprobs"]).replace("<end>", "") == expected
    others = [other for each in request["logprobs"] for other in each["top"]]
    assert all((len(other["text"]) == 1) == (other["token"] > 0) for other in others)
    shown = run("generate", "Once upon", *pair, *SAMPLING, "--logprobs", "2")
    assert shown.stdout == expected + "\n"
    first = request["logprobs"][0]
    titles, line, *others = shown.stderr.splitlines()
    assert titles.split() == ["token", "log-probability", "likeliest"] and len(others) == 39
    assert line.startswith(f"{first['token']} ") and f"{first['logprob']:.3f}" in line
