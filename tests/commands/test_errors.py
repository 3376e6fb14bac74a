"""Bad input: one message with got and expected, exit code 2, nothing on standard output."""

from __future__ import annotations

import ast
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import specdec_fast
from specdec_fast import extras
from specdec_fast.commands import open_engine
from specdec_fast.commands.error_wording import OF_CODE, REMEDIES, in_flags
from specdec_fast.commands.prompts import read_prompts
from specdec_fast.core.remedies import RefusedError, Remedy

# Arguments ({name} is a folder of the `models` fixture) and what the message must contain.
CASES = [
    (["generate", "x", "--model", "{target}/nowhere"], ["model: got", "nowhere", "expected"]),
    (["generate", "x", "--model", "{broken}"], ["model: got", "expected"]),
    (["generate", "x", "--model", "{cut}"], ["model: got", "expected"]),
    (["generate", "x", "--model", "{partial}"], ["weights lack 1 tensors", "lm_head.weight"]),
    (
        ["generate", "x", "--model", "{target}", "--draft", "{stranger}"],
        ["tokenizer differs", "same vocabulary"],
    ),
    (
        ["generate", "x", "--model", "{target}", "--draft", "{target}/nowhere"],
        [
            "error: --draft: got '",
            "nowhere', which does not exist; expected a bundled name",
            "or a hub id (owner/name)\n",
        ],
    ),
    (["generate", "x", "--model", "{bare}"], ["prompt: got text and a model without a tokenizer", "--file ids.jsonl"]),
    (
        ["generate", "--file", "{ids}", "--model", "{bare}", "--stop", "x"],
        ["error: --stop: got a model without a tokenizer", '"stop_token_ids": [7]', "pass ids with --file"],
    ),
    (
        ["generate", "x", "--model", "{target}", "--drafter", "draft_model"],
        ["drafter draft_model: got no draft model; expected --draft with a model of the target's family"],
    ),
    (["generate", "", "--model", "{target}"], ["prompt: got an empty text"]),
    (["generate", "--model", "{target}"], ["standard input: got nothing; expected a prompt; pass it as an argument"]),
    (["generate", "--file", "/dev/null", "--model", "{target}"], ["--file /dev/null: got an empty text"]),
    (["generate", "--file", "/dev/null", "--lines", "--model", "{target}"], ["--file /dev/null: got no prompt"]),
    (["generate", "x" * 3000, "--model", "{target}"], ["prompt: got 3000 tokens", "context limit of 2048"]),
    (
        ["generate", "x", "--dtype", "float64", "--fused-forward", "--model", "{target}"],
        ["error: --fused-forward: cannot be met: ", "(--compile serves every model)"],
    ),
    (["generate", "x", "--temperature", "-1"], ["error: --temperature: got -1.0", "expected 0 (greedy)"]),
    (["generate", "x", "--temperature", "nan"], ["error: --temperature: got nan", "finite"]),
    (["generate", "x", "--top-k", "-3"], ["error: --top-k: got -3"]),
    (["generate", "x", "--min-p", "1.5"], ["error: --min-p: got 1.5"]),
    (["generate", "x", "--seed", "-1"], ["error: --seed: got -1"]),
    (["generate", "x", "--max-new-tokens", "0"], ["error: --max-new-tokens: got 0"]),
    (
        ["generate", "x", "--min-new-tokens", "9", "--max-new-tokens", "8"],
        ["error: --min-new-tokens: got 9; expected 0 to --max-new-tokens (8)"],
    ),
    (["generate", "x", "--stop", ""], ["error: --stop: got ''; expected non-empty strings"]),
    (["generate", "x", "--logprobs", "-1"], ["error: --logprobs: got -1; expected a count from 0 to 1000"]),
    (["generate", "--file", "{target}/nowhere.txt"], ["--file: got", "not a file"]),
    (["generate", "--file", "{target}"], ["--file: got", "not a file"]),
    (["generate", "--file", "{target}/model.safetensors"], ["not UTF-8"]),
    (["generate", "x", "--file", "{target}/config.json"], ["an argument and --file"]),
    (["generate", "x", "--temperature", "abc"], ["error: --temperature: got 'abc'; expected a number\n"]),
    (["generate", "x", "--max-new-tokens", "ten"], ["error: --max-new-tokens: got 'ten'; expected an integer\n"]),
    (["generate", "x", "--ban", "1", "--ban", "two"], ["error: --ban: got 'two'; expected an integer\n"]),
    (["serve", "--port", "80000"], ["error: --port: got '80000'; expected at most 65535\n"]),
    (["serve", "--max-rows", "0"], ["error: --max-rows: got '0'; expected at least 1\n"]),
    (
        ["generate", "x", "--model", "{empty}"],
        ["--model: got '", "', a folder without config.json; expected a bundled"],
    ),
    (["generate", "x", "--model", "{text}"], ["--model: got '", "which is not a GGUF file (it begins with b'not ')"]),
    (
        ["generate", "x", "--model", "no.gguf"],
        ["--model: got 'no.gguf', which does not exist; expected a .gguf file", "or owner/name:file.gguf for one"],
    ),
    (["generate", "x", "--dtype", "fp16"], ["--dtype: got 'fp16'; expected one of", "; did you mean 'float16'?\n"]),
    (["generate", "x", "--draft", "none"], ["--draft: got 'none'; expected a model; --drafter none decodes plainly"]),
    (
        ["generate", "x", "--draft", "demo-medusa"],
        ["draft: got 'demo-medusa', a bundled head; it comes with drafter medusa"],
    ),
    (["generate", "x", "--lines"], ["--lines: got a prompt as argument"]),
    (["generate", "x", "--json", "--color"], ["--json with --color"]),
    (["generate", "x", "--rule", "blok"], ["error: --rule: got 'blok'; expected one of ", "; did you mean 'block'?\n"]),
    (["generate", "x", "--drafter", "egale"], ["error: --drafter: got 'egale'", ", or none; did you mean 'eagle'?\n"]),
    (
        ["generate", "x", "--model", "demo-tarket"],
        ["error: --model: got 'demo-tarket'", "did you mean 'demo-target'?\n"],
    ),
    (["generate", "x", "--drafter", "ngram", "--budget", "fixd"], ["fixed, goodput; did you mean 'fixed'?\n"]),
    (
        ["generate", "x", "--drafter", "ngram", "-o", "n_mix=1"],
        ["got option 'n_mix'; expected one of", "did you mean 'n_min'"],
    ),
    (["kernels", "check", "kv_stgae"], ["kernels operator: got 'kv_stgae'", "; did you mean 'kv_stage'?\n"]),
    (["generate", "x", "--rule", "wish"], ["error: --rule: got 'wish'", "replay"]),
    (["generate", "x", "--drafter", "wish"], ["--drafter: got 'wish'", "ngram"]),
    (["generate", "x", "--draft", "a", "--drafter", "ngram"], ["--draft a with --drafter ngram"]),
    (["generate", "x", "--model", "{target}", "--drafter", "draft_model"], ["no draft model"]),
    (["generate", "x", "--drafter", "ngram", "-o", "wish=1"], ["drafter ngram: got option 'wish'", "n_max"]),
    (["generate", "x", "--drafter", "ngram", "-o", "n_max"], ["--drafter-option: got 'n_max'", "NAME=VALUE"]),
    (["generate", "x", "--model", "{target}", "-o", "n_max=3"], ["--drafter-option n_max: got no drafter"]),
    (
        ["generate", "x", "--drafter", "ngram", "--budget", "most"],
        ["error: --budget: got 'most'; expected one of entropy, fixed, goodput\n"],
    ),
    (["generate", "x", "--drafter", "ngram", "--budget", "entropy"], ["got drafter ngram", "expected draft_model"]),
    (["generate", "x", "--drafter", "ngram", "-o", "n_max=abc"], ["n_max: got 'abc'; expected a whole number"]),
    (
        ["generate", "x", "--model", "{target}", "--drafter", "suffix", "-o", "factor=abc"],
        ["drafter suffix: got {", "'factor': 'abc'", "factor=2.0"],
    ),
    (["generate", "x", "--drafter", "ngram", "-o", "n_max=0"], ["error: drafter ngram: n_min, n_max: got 2, 0"]),
    (
        ["generate", "x", "--model", "{target}", "--drafter", "rest", "-o", "datastore={target}/nowhere"],
        ["specdec: error: drafter rest: datastore: got '", "nowhere': No such file", "`specdec datastore build`"],
    ),
    (
        ["generate", "x", "--model", "{target}", "--drafter", "rest", "-o", "datastore={target}/config.json"],
        ["specdec: error: drafter rest: /", "config.json: this is no datastore file; expected one that specdec wrote"],
    ),
    (
        ["generate", "x", "--model", "{target}", "--drafter", "suffix", "-o", "store={target}"],
        ["specdec: error: drafter suffix: got '", "': Is a directory; expected a readable file"],
    ),
    (
        ["generate", "x", "--model", "{target}", "--drafter", "layer_skip", "-o", "exit_after=9"],
        ["specdec: error: drafter layer_skip: exit_after: got 9; expected 0..1: the model has 2 layers"],
    ),
    (
        ["generate", "x", "--model", "{target}", "--drafter", "layer_skip", "-o", "layers={target}/nowhere"],
        ["specdec: error: drafter layer_skip: layers: got '", "which is no file; make one with `specdec tune layers`"],
    ),
    *(
        (
            ["generate", "x", "--model", "{target}", "--drafter", name, "-o", "head=somebody/heads"],
            [f"drafter {name}: head: got 'somebody/heads'; expected a folder with config.json", "download it first"],
        )
        for name in ("medusa", "blockwise", "eagle", "eagle3", "mtp")
    ),
    (["generate", "x", "--model", "{target}", "--draft-tokens", "4"], ["--draft-tokens 4: got no drafter"]),
    (["generate", "x", "--draft-tokens", "-1"], ["--draft-tokens: got -1"]),
    (
        ["generate", "x", "--model", "{target}", "--rule", "greedy", "--temperature", "1"],
        ["rule greedy: got temperature 1.0"],
    ),
    (["generate", "x", "--model", "{target}", "--dtype", "int3"], ["error: --dtype: got 'int3'", "bfloat16"]),
    (["generate", "x", "--model", "{target}", "--device", "toaster"], ["--device: got 'toaster'"]),
    (["generate", "x", "--model", "{target}", "--device", "meta"], ["--device: got 'meta'", "cpu, cuda or cuda:N"]),
    (["kernels", "check", "--device", "toaster"], ["--device: got 'toaster'", "cpu, cuda or cuda:N"]),
    (["generate", "x", "--model", "{target}", "--threads", "0"], ["--threads: got 0"]),
    (["generate", "x", "--model", "{target}", "--max-length", "0"], ["--max-length: got 0"]),
    (["demo", "--prompts", "0"], ["--prompts: got 0", "expected 1.."]),
    (["demo", "--prompts", "1000"], ["--prompts: got 1000"]),
    (["demo", "--repeats", "0"], ["--repeats: got 0"]),
    (["demo", "--drafter", "none"], ["no drafter to compare"]),
    (["demo", "--model", "{target}", "--budget", "goodput"], ["no drafter to compare"]),
    (["demo", "--model", "{bare}", "--drafter", "ngram"], ["demo: got '", "which has no tokenizer; expected one"]),
    (["demo", "--max-new-tokens", "0"], ["error: --max-new-tokens: got 0"]),
    (["demo", "--temperature", "-1"], ["error: --temperature: got -1.0"]),
    (["lab", "--out", "{target}/report", "--top-k", "-2"], ["error: --top-k: got -2"]),
    (["demo", "--rule", "wish"], ["rule: got 'wish'"]),
]


@pytest.mark.parametrize(("args", "fragments"), CASES, ids=lambda value: " ".join(value)[:60])
def test_message_and_exit_code(
    run: Any, models: dict[str, str], tmp_path: Path, args: list[str], fragments: list[str]
) -> None:
    (tmp_path / "ids.json").write_text("[5, 6]")
    (tmp_path / "text.gguf").write_text("not a model")
    (tmp_path / "empty").mkdir()
    models = models | {"ids": str(tmp_path / "ids.json"), "text": str(tmp_path / "text.gguf")}
    models |= {"empty": str(tmp_path / "empty")}
    result = run(*(arg.format_map(models) if "{" in arg else arg for arg in args))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("specdec: error: ")
    assert "Traceback" not in result.stderr
    for fragment in fragments:
        assert fragment in result.stderr


@pytest.mark.parametrize("columns", ["40", "100"])
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--nope"], "No such option: --nope; see `specdec --help`"),
        (["nope"], "No such command 'nope'; see `specdec --help`"),
        (["generate", "--nope"], "No such option: --nope"),
        (["generate", "x", "y"], "Got unexpected extra argument(s) (y); see `specdec generate --help`"),
        (["serve", "--port"], "Option '--port' requires an argument; see `specdec"),
        (["tune", "nope"], "No such command 'nope'; see `specdec tune --help`"),
        (["kernels", "list", "--nope"], "No such option: --nope; see `specdec kernels list --help`"),
        (["datastore", "build"], "Missing argument 'inputs'; see `specdec datastore build --help`"),
        (["train", "medusa", "--nope"], "No such option: --nope"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else None,
)
def test_usage_errors_have_the_form_of_all_others(run: Any, args: list[str], words: str, columns: str) -> None:
    result = run(*args, env={"COLUMNS": columns})
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith(f"specdec: error: {words}") and result.stderr.count("\n") == 1


def test_a_program_without_arguments_shows_its_help(run: Any) -> None:
    assert "Usage:" in run().output and "error" not in run("tune").stderr


def test_a_hub_lookup_is_announced_first(run: Any, models: dict[str, str], tmp_path: Path) -> None:
    result = run("generate", "x", "--model", models["target"], "--draft", "nobody/nothing")
    asked, reworded = result.stderr.splitlines()
    assert result.exit_code == 2 and result.stdout == ""
    assert asked.startswith("specdec: note: looking for nobody/nothing on the hub; without a connection")
    assert reworded.startswith("specdec: error: --draft: got 'nobody/nothing'; expected a bundled name")
    assert "a hub id that is reachable from here (to work offline, download it first" in reworded
    text = tmp_path / "text.txt"
    text.write_text("a text")
    built = run("datastore", "build", str(text), "--model", "nobody/nothing", "--output", str(tmp_path / "store"))
    assert built.exit_code == 2 and built.stderr.startswith("specdec: note: looking for nobody/nothing on the hub;")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--adapter", "./no-adapter"], "--adapter: got './no-adapter', which does not exist; expected the folder or"),
        (["--adapter", "{target}"], "', a folder without adapter_config.json; expected the folder or hub id of a PEFT"),
        (["--json-schema", "no.json"], "--json-schema: got 'no.json', which is no file; expected a file, or a JSON"),
        (["--model", "{text}"], "which is not a GGUF file"),
    ],
)
def test_what_was_given_is_checked_before_what_is_installed(
    run: Any,
    models: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    words: str,
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    (tmp_path / "text.gguf").write_text("not a model")
    known = models | {"text": str(tmp_path / "text.gguf")}
    result = run("generate", "x", *(each.format_map(known) for each in options))
    assert result.exit_code == 2 and words in result.stderr and "not installed" not in result.stderr


def test_a_missing_extra_comes_before_a_note_about_work(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    monkeypatch.setattr(open_engine, "_LARGE_FILE", 0)
    (tmp_path / "model.gguf").write_bytes(b"GGUF and more")
    result = run("generate", "x", "--model", str(tmp_path / "model.gguf"))
    assert result.exit_code == 2 and "gguf, accelerate are not installed" in result.stderr
    assert "converting" not in result.stderr


@pytest.mark.parametrize(
    ("message", "own", "reworded"),
    [
        ("SamplingParams.top_p: got 2; expected 1", (), "--top-p: got 2; expected 1"),
        ("banned_token_ids: got 5000; expected", (), "--ban: got 5000; expected"),
        ("banned_token_ids: got 5000; expected", ("banned_token_ids",), "banned_token_ids: got 5000; expected"),
        ("logit_bias: x; ban with banned_token_ids", (), "--logit-bias: x; ban with --ban"),
        ("forced_tokens: got 3; expected", (), "forced_tokens: got 3; expected"),
        ("a.json: SamplingParams.top_k: got -1", (), "a.json: SamplingParams.top_k: got -1"),
        (
            "prompt: got 9 tokens; expected fewer than the context limit of 8, which is the default of load; pass "
            "max_length to load, or shorten the prompt",
            (),
            "prompt: got 9 tokens; expected fewer than the context limit of 8, which is the default; pass "
            "--max-length, or shorten the prompt",
        ),
    ],
)
def test_messages_name_parameters_by_their_flags(message: str, own: tuple[str, ...], reworded: str) -> None:
    assert in_flags(ValueError(message), own) == reworded


@pytest.mark.parametrize("remedy", Remedy)
def test_every_remedy_is_one_of_the_program(remedy: Remedy) -> None:
    words = in_flags(RefusedError("messages: got a fault", remedy))
    assert words == f"messages: got a fault; {REMEDIES[remedy]}" and not re.search(r"\w=(?!\w)", words)
    words = in_flags(RefusedError("bad_words: got a fault", remedy))
    assert words == f"--bad-word: got a fault; {REMEDIES[remedy]}"


def texts_of(file: Path) -> Iterator[str]:
    """The literal texts of a module; a line break marks a value inside."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(each.value) if isinstance(each, ast.Constant) else "\n" for each in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_words_that_are_replaced_are_those_of_the_library() -> None:
    """Else a message that changes there shows the words of Python again."""
    package = Path(specdec_fast.__file__).parent
    texts = [text for file in package.rglob("*.py") if "commands" not in file.parts for text in texts_of(file)]
    assert [words for words in OF_CODE if not any(words in text for text in texts)] == []


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("a.json", "[", "not JSON"),
        ("a.json", "[]", "a.json: got no prompt"),
        ("a.json", '[""]', "empty text"),
        ("a.json", '[{"text": "x"}]', "an object with a prompt"),
        ("a.json", "[1.5]", "a list of token ids"),
        ("a.json", "[[99999]]", "a.json, prompt 1: prompt: got token id 99999"),
        ("a.jsonl", '{"prompt": "x", "banned_token_ids": [99999]}', "a.jsonl, line 1: banned_token_ids: got 99999"),
        ("a.jsonl", "[]", "a.jsonl, line 1: got an empty list; expected at least one token id"),
        ("a.json", "{", "a.json: got text that is not JSON"),
        ("a.jsonl", '"x"\n{', "a.jsonl, line 2: got text that is not JSON"),
        ("a.jsonl", '"x"\n\n[1.5]', "a.jsonl, line 3: got [1.5]; expected"),
        (
            "a.jsonl",
            '"x"\n{"prompt": "y", "wish": 1}',
            "a.jsonl, line 2: got the key 'wish'; expected prompt, messages, id, or a",
        ),
        ("a.json", '["x", {"prompt": "y", "top_k": -2}]', "a.json, prompt 2: SamplingParams.top_k: got -2; expected 0"),
        ("a.json", '{"prompt": "y", "ignore_eos": "no"}', "a.json: SamplingParams.ignore_eos: got 'no'; expected True"),
        ("a.json", '{"prompt": "y", "seed": true}', "a.json: SamplingParams.seed: got True; expected 0 <= seed"),
        ("a.txt", "", "empty text"),
    ],
)
def test_prompt_files(run: Any, models: dict[str, str], tmp_path: Path, name: str, content: str, fragment: str) -> None:
    (tmp_path / name).write_text(content)
    result = run("generate", "--file", str(tmp_path / name), "--model", models["target"])
    assert result.exit_code == 2
    assert fragment in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("file", [None, "-"])
def test_standard_input_that_is_closed_has_no_prompt(file: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ValueError, match="prompt: got none; pass it as an argument, with --file FILE, or on standard"):
        read_prompts(None, file, lines=False)


def test_standard_input_that_is_not_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for errors in ("strict", "surrogateescape"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8", errors=errors))
        message = r"standard input: got bytes that are not utf-8 text \(byte 2\); convert it first"
        with pytest.raises(ValueError, match=message):
            read_prompts(None, None, lines=False)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfa\r\nb\n"), encoding="utf-8"))
    assert read_prompts(None, None, lines=True) == ["a", "b"]


def test_a_pipe_is_a_file_too() -> None:
    """As the shell's <(command) makes them."""
    reading, writing = os.pipe()
    os.write(writing, b"one\ntwo\n")
    os.close(writing)
    try:
        assert read_prompts(None, f"/dev/fd/{reading}", lines=True) == ["one", "two"]
    finally:
        os.close(reading)
