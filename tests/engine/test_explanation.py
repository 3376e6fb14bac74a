"""What an engine says about itself: rule, drafter, passes and steps, each with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import models
from oracles.automaton import AutomatonTarget, random_logits

from specdec_fast import Engine, get_rule, load
from specdec_fast.commands.open_engine import resolve
from specdec_fast.engine.explanation import weight_storage


def test_the_default_rule_is_not_called_a_choice() -> None:
    target = AutomatonTarget(random_logits(11, 6))
    assert Engine(target).explain().startswith("rule replay: the default\n")
    assert Engine(target, rule="greedy").explain().startswith("rule greedy: asked for by name\n")
    assert Engine(target, rule=get_rule("greedy")).explain().startswith("rule greedy: passed as an object\n")


def test_budgets_that_choose_are_named() -> None:
    with load("demo-target", drafter="suffix", budget="goodput", max_length=64) as engine:
        assert "\ndrafter suffix with budget goodput\n" in engine.explain()
    with load("demo-target", drafter="suffix", max_length=64) as engine:
        assert "\ndrafter suffix\n" in engine.explain()
    assert "\ndrafter none\n" in Engine(AutomatonTarget(random_logits(11, 6)), budget="goodput").explain()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fused_forward": True}, "passes float32 on cpu, fused"),
        ({"fused_forward": False}, "passes float32 on cpu, not fused: it was not requested"),
        ({"compile": True}, "passes float32 on cpu, not fused: they are compiled"),
    ],
)
def test_passes_say_their_dtype_and_whether_they_are_fused(options: dict[str, Any], words: str) -> None:
    with load(models.own("llama"), max_length=64, eos_token_ids=(), **options) as engine:
        lines = engine.explain().splitlines()
        assert words in lines and "steps sync: CUDA graphs need a GPU, and the device is cpu" in ";".join(lines)


def test_half_precision_is_named() -> None:
    with load(models.own("llama").to(torch.bfloat16), max_length=64, eos_token_ids=()) as engine:
        assert "\npasses bfloat16 on cpu, " in engine.explain()


def test_int8_weights_are_named(tmp_path: Path) -> None:
    models.own("llama").save_pretrained(tmp_path)
    with load(tmp_path, max_length=64, weights="int8", dtype="bfloat16") as engine:
        assert "\npasses int8 weights, bfloat16 computation on cpu, " in engine.explain()


def test_weights_of_packed_layers_are_named() -> None:
    class Packed(torch.nn.Module):
        """Eight weights of 4 bits in each integer, as GPTQ and AWQ store them."""

        in_features, out_features = 64, 32

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("qweight", torch.zeros(8, 32, dtype=torch.int32))
            self.register_buffer("scales", torch.zeros(1, 32, dtype=torch.float16))

    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), Packed(), torch.nn.Embedding(4, 4))
    assert weight_storage(layers) == "int4"
    assert weight_storage(layers[:1]) == weight_storage(None) == ""


@pytest.mark.parametrize("fused", [None, False])
def test_json_says_whether_passes_are_fused(fused: bool | None) -> None:
    """The option alone says nothing where it is left out."""
    names = {"draft": None, "drafter": "none", "rule": "replay", "draft_tokens": None, "dtype": "float32"}
    setup = resolve(model="tiny", device="cpu", compile=False, fused_forward=fused, **names)  # type: ignore[arg-type]
    assert setup.describe()["fused_forward"] is fused and setup.describe()["rule"] == "replay"
    with load(models.own("llama"), max_length=64, eos_token_ids=(), fused_forward=fused) as engine:
        assert setup.describe(engine)["fused_forward"] is (fused is None)
