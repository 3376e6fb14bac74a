"""Training of EAGLE heads: unrolled steps are real drafting, losses are those of the papers, and a head learns."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import heads, models

from specdec_fast import Engine, SamplingParams, load
from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.draft import Draft
from specdec_fast.draft_runners.head_runner import PagedHead
from specdec_fast.drafters import make_drafter
from specdec_fast.heads.checkpoint_eagle import load_eagle, load_eagle3, save_eagle, save_eagle3
from specdec_fast.heads.unroll import unroll
from specdec_fast.loading import load_model, load_tokenizer
from specdec_fast.train.heads.recurrent import Eagle3Trainee, EagleTrainee, frequent_ids, new_eagle, new_eagle3
from specdec_fast.train.heads.settings import Settings
from specdec_fast.train.heads.target_states import TargetStates
from specdec_fast.train.heads.trainer import fit
from specdec_fast.train.heads.training_texts import read_token_row, split


def opened(name: str, folder: Path) -> tuple[Any, Any, Any]:
    """(target, the head over its cache, a copy of the head outside of it)."""
    target = models.target("llama", max_rows=2)
    drafter: Any = make_drafter(name, heads.options(name, folder), target=target)
    outside = copy.deepcopy(drafter.model.head)
    outside.config._attn_implementation = "sdpa"
    return target, drafter.model, outside


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
@torch.no_grad()
def test_an_unrolled_step_is_that_step_of_drafting(name: str, tmp_path: Path) -> None:
    """Step j at place t: places 0..t stored from true features, then j nodes of a chain fed with the head's own."""
    _, paged, outside = opened(name, tmp_path)
    tokens, steps = torch.tensor(models.prompt(12)), 4
    source = torch.Generator().manual_seed(3)
    features = torch.randn(11, heads.HIDDEN, generator=source)
    found = unroll(outside, paged.embed(tokens[1:])[None], features[None], steps)
    assert paged.cache.reserve(0, 16)
    for place in (0, 3, 7):
        paged.cache.rollback(torch.tensor([0], dtype=torch.int32), torch.tensor([0], dtype=torch.int32))
        shape = chain_layout((0,), (place + 1,), torch.device("cpu"))
        hidden = paged.extend(shape.rows, tokens[1 : place + 2], features[: place + 1], shape.offsets)[-1:]
        assert torch.allclose(found[0][0, place], hidden[0], atol=1e-4, rtol=1e-3)
        fed = hidden
        for step in range(1, steps):
            draft = Draft.chains([0], [tokens[place + 2 : place + 2 + step].tolist()])
            hidden = paged.score(draft, fed)
            assert torch.allclose(found[step][0, place], hidden[-1], atol=1e-4, rtol=1e-3), (place, step)
            fed = torch.cat([fed, hidden[-1:]])


def states_of(target: Any, aux_hidden_states: tuple[str, ...]) -> TargetStates:
    return TargetStates(models.own("llama"), tuple(dict.fromkeys((*aux_hidden_states, "final_norm"))))


@pytest.mark.parametrize("prompt", [0, 5])
def test_the_loss_of_eagle_3_is_the_published_one(tmp_path: Path, prompt: int) -> None:
    """Written out place by place: 0.8 ** step times the mean cross-entropy over places the vocabulary serves and whose
    token is none of the prompt's.
    """
    target, _, outside = opened("eagle3", tmp_path)
    states = states_of(target, outside.aux_hidden_states)
    trainee = Eagle3Trainee(outside, states, ahead=3).eval()
    tokens = torch.tensor([models.prompt(10), models.prompt(20)[10:]])
    with torch.no_grad():
        loss, measures = trainee(torch.cat([~tokens[:, :prompt], tokens[:, prompt:]], 1))
        caught = states(tokens)
        features = outside.fuse([caught[aux_hidden_state] for aux_hidden_state in outside.aux_hidden_states])[:, :-1]
        found = unroll(outside, target.embed(tokens[:, 1:]), features, 3)
        want, chains = 0.0, np.zeros(3)
        counts = np.zeros(3)
        ids = outside.token_ids
        for step in range(3):
            terms = []
            for row in range(2):
                for place in range(9 - step):
                    whole = target.lm_head(caught["final_norm"][row, place + step + 1])
                    if int(whole.argmax()) in heads.KEPT and place + step + 2 >= prompt:
                        own = outside.read(found[step][row, place], None).log_softmax(-1)
                        terms.append(-float((whole[ids].softmax(-1) * own).sum()))
                    if max(prompt - 2, 0) <= place < 8 - step:
                        drafted = [int(ids[outside.read(found[j][row, place], None).argmax()]) for j in range(step + 1)]
                        chains[step] += drafted == tokens[row, place + 2 : place + 3 + step].tolist()
                        counts[step] += 1
            want += 0.8**step * float(np.mean(terms))
    assert float(loss) == pytest.approx(want, rel=1e-4)
    assert float(measures["tokens_per_step"]) == pytest.approx(1 + float((chains / counts).sum()), rel=1e-4)


@pytest.mark.parametrize("prompt", [0, 5])
def test_the_loss_of_eagle_1_is_the_published_one(tmp_path: Path, prompt: int) -> None:
    target, _, outside = opened("eagle", tmp_path)
    states = states_of(target, outside.aux_hidden_states)
    trainee = EagleTrainee(outside, states).eval()
    tokens = torch.tensor([models.prompt(10)])
    with torch.no_grad():
        loss, _ = trainee(torch.cat([~tokens[:, :prompt], tokens[:, prompt:]], 1))
        true = states(tokens)["final_norm"]
        got = unroll(outside, target.embed(tokens[:, 1:]), true[:, :-1], 1)[0]
        dist, own = target.lm_head(true[:, 1:]).softmax(-1), target.lm_head(got).log_softmax(-1)
        gap = (got - true[:, 1:]).abs()
        smooth = torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean(-1)
        want = (smooth - 0.1 * (dist * own).sum(-1))[0, max(prompt - 2, 0) :].mean()
    assert float(loss) == pytest.approx(float(want), rel=1e-4)
    assert torch.isfinite(trainee.train()(tokens)[0])


def test_the_draft_vocabulary_is_the_most_frequent_one() -> None:
    row = np.array([5, 5, 5, 2, 2, 7, 0, 0])
    assert frequent_ids(np.append(row, [~3] * 9), 2, 9).tolist() == [0, 5], "what does not count is not counted"
    assert frequent_ids(row, 3, 9).tolist() == [0, 2, 5] and frequent_ids(row, 5, 9).tolist() == [0, 1, 2, 5, 7]
    for count in (0, 10):
        with pytest.raises(ValueError, match=f"draft vocabulary: got {count}; expected 1 to the target's 9"):
            frequent_ids(row, count, 9)


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_head_learns_and_drafts_the_same_after_saving(name: str, tmp_path: Path) -> None:
    """Some seconds on a text of the corpus, for the bundled target: loss falls, acceptance rises, the text stays."""
    model, tokenizer = load_model("demo-target"), load_tokenizer("demo-target")
    settings = Settings(steps=40, batch=2, length=64, lr=5e-3, measure_every=40, saving=0.01)
    row, held = split(read_token_row([Path(argparse.__file__)], "text", tokenizer), settings.length, blocks=6)
    torch.manual_seed(0)
    head = new_eagle(model) if name == "eagle" else new_eagle3(model, frequent_ids(row, 512, 1024))
    states = TargetStates(model, tuple(dict.fromkeys((*head.aux_hidden_states, "final_norm"))))
    trainee: Any = Eagle3Trainee(head, states, ahead=3)
    if name == "eagle":
        trainee = EagleTrainee(head, states, token_weight=0.5, noise=0.02)
    history = fit(trainee, states, row, held, settings, tmp_path / "run").history
    assert history[-1]["held_loss"] < 0.85 * history[0]["held_loss"]
    assert history[-1]["accepted_1"] > history[0]["accepted_1"] + 0.1
    assert history[-1]["tokens_per_step"] > history[0]["tokens_per_step"] + 0.1
    saving = {"eagle": save_eagle, "eagle3": save_eagle3}[name]
    saving(tmp_path / "head", head)
    params = SamplingParams(temperature=0, max_new_tokens=24)
    prompt = tokenizer.encode("The lighthouse")
    plain = load("demo-target", drafter="none", max_rows=1).generate([prompt], params)[0]
    options = {"head": str(tmp_path / "head")}
    engine = load("demo-target", drafter=name, drafter_options=options, max_rows=1)
    again = engine.generate([prompt], params)[0]
    assert again.tokens == plain.tokens and again.stats.tau > 1.1
    target: Any = engine.target
    loading = {"eagle": load_eagle, "eagle3": load_eagle3}[name]
    drafted = []
    for source in (copy.deepcopy(head), loading(tmp_path / "head", target)):
        made: Any = make_drafter(name, {"head": PagedHead(source, target)}, target=target)
        seen, propose = [], made.propose

        def watched(*args: Any, seen: list[Any] = seen, propose: Any = propose) -> Draft:
            draft: Draft = propose(*args)
            seen.append((draft.tokens.tolist(), draft.parents.tolist()))
            return draft

        made.propose = watched
        Engine(target, made).generate([prompt], params)
        drafted.append(seen)
    assert drafted[0] == drafted[1] and len(drafted[0]) > 3


@torch.no_grad()
def test_acceptance_is_the_overlap_of_two_distributions(tmp_path: Path) -> None:
    """Step j at place t: sum over tokens of min(p, q), p the target's distribution behind the text up to there."""
    target, _, outside = opened("eagle3", tmp_path)
    states = states_of(target, outside.aux_hidden_states)
    trainee = Eagle3Trainee(outside, states, ahead=2)
    tokens = torch.tensor([models.prompt(9)])
    _, measures = trainee.eval()(tokens)
    caught = states(tokens)
    features = outside.fuse([caught[aux_hidden_state] for aux_hidden_state in outside.aux_hidden_states])[:, :-1]
    for step, hidden in enumerate(unroll(outside, target.embed(tokens[:, 1:]), features, 2)):
        found = []
        for place in range(7 - step):
            p = target.lm_head(caught["final_norm"][0, place + step + 1]).softmax(-1)
            q = outside.read(hidden[0, place], None).softmax(-1)
            found.append(sum(min(float(p[token]), float(q[at])) for at, token in enumerate(heads.KEPT)))
        assert float(measures[f"accepted_{step + 1}"]) == pytest.approx(float(np.mean(found)), rel=1e-4)
    assert trainee.train()(tokens)[1] == {}
