"""A model that two processes compute together: all drafters, equal texts, refusals, and processes that die.

`tests/engine/test_lockstep.py` has what engines compare, with threads in place of processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from oracles import heads, models
from oracles.two_ranks import PARAMS, PROMPTS, SHARED

from specdec_fast import load
from specdec_fast.drafters import drafter_names
from specdec_fast.retrieval.datastore import build

ROOT = Path(__file__).parents[2]
REFUSED = {"auto"}
"""Drafters that follow measured times."""
ENDS_WITHIN = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target, a draft model, and drafts of both."""
    place = tmp_path_factory.mktemp("ranks")
    models.own("llama").save_pretrained(place / "target")
    models.kin("llama").save_pretrained(place / "draft")
    build(place / "texts", [[*prompt, *models.prompt(40)] for prompt in PROMPTS], vocab_size=96)
    return place


@pytest.fixture(scope="module")
def engines(folder: Path) -> dict[str, dict[str, Any]]:
    """Arguments of `load` for every drafter."""
    own: dict[str, dict[str, Any]] = {
        **{name: {"drafter": name, "draft": str(folder / "draft")} for name in ("draft_model", "draft_tree")},
        **{name: {"drafter_options": heads.options(name, folder)} for name in ("eagle", "eagle3", "mtp")},
        "rest": {"drafter_options": {"datastore": str(folder / "texts"), "min_match": 1}},
    }
    found = {name: {"drafter": name, **own.get(name, {})} for name in drafter_names() if name not in REFUSED}
    return {"none": {"drafter": "none"}, **found}


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", **more}


@pytest.fixture(scope="module")
def ranks(folder: Path, engines: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What both processes found. Then process 1 is killed, and torchrun ends the other one."""
    (folder / "engines.json").write_text(json.dumps(engines))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ROOT / "tests" / "oracles" / "two_ranks.py"
    run = subprocess.Popen(
        [*torchrun, str(program), str(folder)], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        wait_for(lambda: all((folder / f"done-{rank}").exists() for rank in range(2)) or run.poll() is not None, 600)
        said = run.communicate(timeout=ENDS_WITHIN)[0].decode()
    finally:
        run.kill()
    assert run.returncode and "Signal 9 (SIGKILL)" in said, said
    assert subprocess.run(["pgrep", "-f", str(folder)], stdout=subprocess.DEVNULL).returncode == 1
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def wait_for(happened: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    """The texts of a single process without drafts."""
    engine = load(str(folder / "target"), drafter="none", **SHARED)
    return [each.tokens for each in engine.generate(PROMPTS, PARAMS)]


@pytest.mark.slow
def test_both_processes_have_the_texts_of_one_with_every_drafter(
    ranks: list[dict[str, Any]], engines: dict[str, Any], alone: list[list[int]]
) -> None:
    """Sums of two parts round in another way than sums of one: no near-tie of these texts is as close as that."""
    for found in ranks:
        assert set(found["texts"]) == set(engines)
        assert {name: texts for name, texts in found["texts"].items() if texts != alone} == {}
        assert not any(found["faults"].values())


@pytest.mark.slow
def test_both_processes_have_the_same_bits_whatever_their_numbers_of_threads(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["logprobs"] == second["logprobs"]


@pytest.mark.slow
def test_unseeded_requests_are_the_same_on_both_ranks_of_a_model_and_on_no_others(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["unseeded"] == second["unseeded"] and first["unseeded"][0][0] != first["unseeded"][1][0]
    assert not first["whole ranks"] and not set(first["whole"]) & set(second["whole"])
    assert [len(found["whole"]) for found in ranks] == [1, 2]


@pytest.mark.slow
def test_what_two_processes_cannot_do_is_refused_in_words(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        refused = found["refused"]
        assert "drafter: got 'auto', which follows measured times" in refused["auto"]
        assert "budget: got 'goodput', which follows measured times" in refused["goodput"]
        assert "compile: got True and a model that 2 processes compute together" in refused["compile"]
        assert "fused_forward: got True, but the weights are sharded over 2 processes" in refused["fused_forward"]
        assert "drafter none: none was named, and auto follows measured times" in found["explained"]
        assert "steps sync: 2 processes compute the model" in found["explained"]
        assert "of 2 that hold parts of the weights" in found["explained"]


@pytest.mark.slow
def test_a_failure_in_one_process_is_an_error_in_both_and_both_go_on(
    ranks: list[dict[str, Any]], alone: list[list[int]]
) -> None:
    for found in ranks:
        assert "process 1 of 2 differs from process 0 in its requests" in found["disagreement"]
        assert found["after"] == alone


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_other_with_one_message() -> None:
    """Without torchrun, which would end it too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    program = [sys.executable, str(ROOT / "examples" / "tensor_parallel.py"), "--new-tokens", "24"]
    both = [
        subprocess.Popen(
            program,
            env=environment(**place, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert both[0].stdout is not None
        line = both[0].stdout.readline()
        while "processes: 2" not in line:
            line = both[0].stdout.readline()
            assert both[0].poll() is None
        began = time.monotonic()
        both[0].send_signal(signal.SIGKILL)  # the process that holds the store, too
        said = both[1].communicate(timeout=ENDS_WITHIN)[1]
        assert time.monotonic() - began < ENDS_WITHIN and both[1].returncode == 1
        last = said.strip().splitlines()[-1]
        assert "specdec_fast.core.ranks.LostRankError: ranks: process 1 of 2 lost another one" in last, said
        assert said.count("LostRankError") == 1
    finally:
        for each in both:
            each.kill()
            each.communicate()
