"""The acceptance rate reveals layers that are counted in another convention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import heads
from typer.testing import CliRunner

from specdec_fast import HuggingFaceTarget
from specdec_fast.cli import main
from specdec_fast.draft_runners.detect_aux_layers import best_layers, layer_acceptances, mean_rates
from specdec_fast.draft_runners.head_runner import PagedHead
from specdec_fast.drafters import make_drafter
from specdec_fast.heads.checkpoint_eagle import load_eagle3, save_eagle3
from specdec_fast.heads.eagle3 import Eagle3Head
from specdec_fast.targets.tiny_models import tiny_model

TRUE = (1, 2, 3)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, list[int]]:
    """(target, checkpoint, text): a head that knows one text by heart, from the inputs of layers 1, 2 and 3 of four."""
    from transformers import AutoConfig

    torch.manual_seed(0)
    model = tiny_model("llama", num_hidden_layers=4)
    aux_hidden_states = tuple(f"entering:{index}" for index in TRUE)
    head = Eagle3Head(
        AutoConfig.for_model(**heads.LAYER), vocab_size=96, draft_vocab_size=96, aux_hidden_states=aux_hidden_states
    )
    head.config._attn_implementation = "eager"
    text = torch.randint(0, 96, (1, 48))
    with torch.no_grad():
        seen = model(text, output_hidden_states=True)
        embedded, dist = model.get_input_embeddings()(text[:, 1:]), seen.logits.softmax(-1)[:, 1:]
    features = torch.cat([seen.hidden_states[index] for index in TRUE], -1)[:, :-1]
    place, mask = torch.arange(47)[None], torch.full((47, 47), float("-inf")).triu(1)[None, None]
    optimizer = torch.optim.Adam(head.parameters(), 5e-3)
    for _ in range(30):
        hidden = head(embedded, head.fc(features), place, attention_mask=mask)
        loss = -(dist * head.read(hidden, None).log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    folder = tmp_path_factory.mktemp("head")
    save_eagle3(folder, head)
    return HuggingFaceTarget(model, max_rows=1, max_length=64), folder, text[0].tolist()


def with_layer_ids(folder: Path, place: Path, **ids: Any) -> Path:
    """The same head with other words about its layers."""
    config = json.loads((folder / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"], config["eagle_config"]
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config | ids))
    (place / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return place


def test_the_rate_is_the_mean_sum_of_the_smaller_chances(learnt: Any) -> None:
    """Written out, with transformers' own hidden states and without a cache."""
    target, folder, text = learnt
    rates = mean_rates(layer_acceptances(PagedHead(load_eagle3(folder, target), target), target, text))
    assert set(rates) == {TRUE, (0, 1, 2), (2, 3, 4)} and next(iter(rates)) == TRUE
    model, head = tiny_model("llama", num_hidden_layers=4), load_eagle3(folder, target)
    head.config._attn_implementation = "eager"
    behind: list[torch.Tensor] = []  # transformers' last hidden state is the normed one
    hook = model.model.layers[-1].register_forward_hook(lambda _, __, output: behind.append(output))
    with torch.no_grad():
        seen = model(torch.tensor([text]), output_hidden_states=True)
        hook.remove()
        states = [*seen.hidden_states[:-1], behind[0]]
        dist = seen.logits[0, 1:].softmax(-1)
        mask = torch.full((47, 47), float("-inf")).triu(1)[None, None]
        for ids, rate in rates.items():
            features = head.fuse([states[index][0] for index in ids])[None, :-1]
            embedded = model.get_input_embeddings()(torch.tensor([text[1:]]))
            hidden = head(embedded, features, torch.arange(47)[None], attention_mask=mask)
            q = head.read(hidden, None)[0].softmax(-1)
            assert rate == pytest.approx(float(torch.minimum(dist, q).sum(-1).mean()), abs=1e-4)
    assert target.cache.pages.num_used == 0


@pytest.mark.parametrize(
    "ids",
    [
        {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},  # outputs, where inputs are meant
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},  # outputs, and so they are read
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    ],
)
def test_the_wrong_convention_is_detected(learnt: Any, tmp_path: Path, ids: dict[str, Any]) -> None:
    target, folder, text = learnt
    place = with_layer_ids(folder, tmp_path / "changed", **ids)
    rates = mean_rates(layer_acceptances(PagedHead(load_eagle3(place, target), target), target, text))
    assert rates[TRUE] > rates[0, 1, 2] + 0.1
    made = make_drafter("eagle3", {"head": str(place), "layers": "auto", "text": text}, target=target)
    assert made.needs.aux_hidden_states == ("entering:1", "entering:2", "entering:3")


def test_layers_that_cannot_be_compared_are_refused(learnt: Any, tmp_path: Path) -> None:
    target, folder, text = learnt
    for options, message in (
        ({"layers": "auto"}, "layers: got 'auto' and text None; expected numbers, or 'auto' and a text"),
        ({"layers": "outputs", "text": text}, "layers: got 'outputs'"),
        ({"layers": "auto", "text": text[:9]}, "got a text of 9 tokens; expected at least 16"),
    ):
        with pytest.raises(ValueError, match=message):
            make_drafter("eagle3", {"head": str(folder), **options}, target=target)
    made: Any = make_drafter("eagle", heads.options("eagle", tmp_path), target=target)
    with pytest.raises(ValueError, match="a head that reads final_norm; expected one that reads layers"):
        layer_acceptances(made.model, target, text)


@pytest.mark.parametrize("whose", ["target", "model"])
def test_a_pool_without_room_for_the_text_is_refused(learnt: Any, whose: str) -> None:
    target, folder, text = learnt
    model = PagedHead(load_eagle3(folder, target), target)
    cache = {"target": target, "model": model}[whose].cache
    held = cache.pages.allocate(cache.pages.num_free - 1)
    try:
        with pytest.raises(ValueError, match="layers: got a pool of 1 free pages; expected"):
            layer_acceptances(model, target, text)
    finally:
        cache.pages.free(held)


def test_the_command_prints_the_layers_to_use(learnt: Any, tmp_path: Path) -> None:
    target, folder, text = learnt
    target.model.set_attn_implementation("eager")
    target.model.save_pretrained(tmp_path / "model")
    target.model.set_attn_implementation("specdec_paged")
    (tmp_path / "text.json").write_text(json.dumps([text]))
    place = with_layer_ids(folder, tmp_path / "changed", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    command = ["tune", "head-layers", "--model", str(tmp_path / "model"), "--file", str(tmp_path / "text.json")]
    runner = CliRunner()
    answer = runner.invoke(main, [*command, "--head", str(place), "--json"])
    found = json.loads(answer.stdout)
    assert found["configured"] == [0, 1, 2] and found["best"] == [1, 2, 3]
    said = runner.invoke(main, [*command, "--head", str(place)]).stdout
    assert "inputs of layers [0, 1, 2]: 0." in said and "have a higher acceptance rate, by 0." in said
    assert said.splitlines()[-1].endswith("-o 'layers=[1, 2, 3]'")
    assert "the configuration is right" in runner.invoke(main, [*command, "--head", str(folder)]).stdout


def test_a_difference_within_the_noise_changes_nothing() -> None:
    loaded, other = (1, 2, 3), (0, 1, 2)
    own = [0.5, 0.2, 0.7, 0.4, 0.6]
    assert best_layers({loaded: own, other: [0.9, 0.1, 0.7, 0.6, 0.4]})[0] == loaded, "better by luck"
    best, gain = best_layers({loaded: own, other: [rate + 0.1 for rate in own]})
    assert best == other and gain is not None and gain.mean == pytest.approx(0.1) and gain.low > 0
    assert best_layers({loaded: own}) == (loaded, None)
