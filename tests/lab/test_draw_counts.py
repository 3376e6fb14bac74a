"""Many draws through production randomness: correct rules pass, mutants fail, interrupted runs continue."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.planted_rules import AlteredRule, random_place

from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.interfaces import Rng
from specdec_fast.lab import draw_counts
from specdec_fast.lab.backend_agreement import dists_of_logits
from specdec_fast.lab.draft_enumeration import POLICIES, all_drafts
from specdec_fast.lab.draw_counts import SEEDS, Drawing, branch_dists, coupled_matches, groups_of
from specdec_fast.lab.exact_distributions import has_a_dist, own_rules
from specdec_fast.lab.rational_oracle import RationalModel
from specdec_fast.lab.simulator import TREE, Layout, Simulator, layout_for, picks_for, shared
from specdec_fast.lab.step_enumeration import packed_dists, step_outcomes
from specdec_fast.lab.text_positions import FIRST_SEED
from specdec_fast.rules import get_rule
from specdec_kernels import use_backend

RULES = [name for name in own_rules() if has_a_dist(get_rule(name))]


def smallest(drawing: Drawing) -> dict[str, float]:
    return {test.name: test.p_value for test in drawing.tests()}


@pytest.mark.parametrize("name", RULES)
def test_right_rules_are_accepted(name: str) -> None:
    for number, vocab in ((0, 60), (1, 1500)):
        drawing = Drawing(random_place(vocab, number), get_rule(name), seed=3)
        drawing.run(6000)
        p_values = smallest(drawing)
        assert min(p_values.values()) > 1e-4, p_values
        assert {"first token, chi-square", "joint distribution of 3 tokens", "bonus tokens"} <= p_values.keys()
        assert {"accepted tokens", "recovered tokens", "acceptance rate"} <= p_values.keys()
        summary = drawing.summary()
        assert 0.3 < summary["acceptance_rate"] < 0.999
        counts = drawing.counts
        assert counts.first.sum() == counts.accepted.sum() + counts.recovered.sum() == counts.depth.sum() == 6000
        assert counts.joint.sum() == 1500 and counts.after_rejection.sum() > 100


PICKED = [(name, pick) for name in RULES for pick in picks_for(get_rule(name))[1:]]


@pytest.mark.parametrize(("name", "pick"), PICKED)
def test_every_way_to_pick_keeps_the_distribution(name: str, pick: str) -> None:
    drawing = Drawing(random_place(60, 2), get_rule(name), seed=4, pick=pick)
    drawing.run(4000)
    p_values = smallest(drawing)
    assert drawing.simulator.layout.pick == pick
    assert min(p_values.values()) > 1e-4, p_values
    assert ("acceptance rate" in p_values) == (pick != "without"), "siblings without replacement have no short form"
    assert 0.02 < drawing.summary()["acceptance_rate"] < 0.999
    assert drawing.fingerprint != Drawing(random_place(60, 2), get_rule(name), seed=4).fingerprint


def test_ways_to_pick_are_those_of_the_rule() -> None:
    ways = {name: set(picks_for(get_rule(name))) for name in RULES}
    trees = {"hybrid", "deterministic", "sampled", "iid", "without"}
    assert ways["rejection"] == ways["block"] == {"sampled", "deterministic"}
    assert ways["recursive_rejection"] == ways["traversal"] == trees and ways["replay"] == trees | {"coupled"}
    with pytest.raises(ValueError, match="pick for rule rejection: got 'iid'; expected one of sampled, deterministic"):
        Drawing(random_place(60), get_rule("rejection"), seed=1, pick="iid")
    assert layout_for(get_rule("replay"), 32_000, "iid").parents == (-1, 0, 0)


def test_deterministic_tokens_are_the_likeliest_and_carry_no_distribution() -> None:
    here = random_place(12, 2)
    simulator = Simulator(get_rule("recursive_rejection"), here.p, here.q, Layout(TREE, "deterministic"))
    draft = simulator.draft(torch.arange(3), torch.zeros(3, dtype=torch.int32))
    best = np.argsort(-here.draft)[:2].tolist()
    assert draft.tokens.view(3, -1)[:, 1:].tolist() == [[*best, *best]] * 3
    assert simulator.deterministic_tokens == tuple(best)
    assert draft.dists is None and not draft.proposal_kinds.any() and (draft.dist_index == -1).all()


def test_deterministic_tokens_that_pass_for_sampled_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arg-max draft with the softmax as its distribution."""
    fill = Simulator._fill

    def marked(self, tokens, proposal_kinds, group, seeds, positions):
        fill(self, tokens, proposal_kinds, group, seeds, positions)
        proposal_kinds[group] = 1

    monkeypatch.setattr(Simulator, "_fill", marked)
    drawing = Drawing(random_place(60, 0), get_rule("rejection"), seed=3, pick="deterministic")
    drawing.run(10_000)
    assert smallest(drawing)["first token, chi-square"] < 1e-6


def from_p(found, draft, dists, rng):
    """After a rejection: a draw from p."""
    weights = dists.probs()[:1].double()
    gumbel = -torch.rand(len(found.next_token), weights.shape[1]).double().log()
    return type(found)(found.path, found.num_accepted, (weights / gumbel).argmax(1))


SPOILT = {
    "redraw from p": ({"acceptance": from_p}, "recovered tokens"),
    "another position's uniforms": (
        {"rng": lambda rng: Rng(rng.seeds, rng.positions * 0)},
        "joint distribution of 3 tokens",
    ),
    "one step of seeds": ({"rng": lambda rng: Rng(rng.seeds // 8, rng.positions)}, "first token, chi-square"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_spoilt_rules_are_rejected_by_the_test_that_is_made_for_it(how: str) -> None:
    spoil, killer = SPOILT[how]
    drawing = Drawing(random_place(60, 0), AlteredRule(get_rule("rejection"), **spoil), seed=3)
    drawing.run(20_000)
    assert smallest(drawing)[killer] < 1e-6


def test_a_draft_that_is_not_from_q_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft tokens drawn at another temperature than their distribution says."""
    draw = Simulator._draw

    def hot(dist, seeds, positions, index):
        return draw(type(dist)(dist.logits, dist.inv_t * 0.7, dist.lse, dist.cut, dist.tie_id), seeds, positions, index)

    monkeypatch.setattr(Simulator, "_draw", staticmethod(hot))
    drawing = Drawing(random_place(60, 0), get_rule("rejection"), seed=3)
    drawing.run(20_000)
    assert min(smallest(drawing).values()) < 1e-6


def test_the_same_distributions_are_shared_not_copied() -> None:
    many = shared(random_place(500).p, 1000)
    assert many.logits.shape == (1000, 500) and many.logits.stride(0) == 0
    assert many.inv_t.shape == (1000,) and many.inv_t.is_contiguous()


@pytest.mark.parametrize("name", ["replay", "rejection", "recursive_rejection", "traversal"])
def test_everything_is_made_on_the_device_of_the_distributions(name: str) -> None:
    """Nothing is left to the default device."""
    simulator = Drawing(random_place(12, 2), get_rule(name), seed=3).simulator
    seeds, positions = torch.arange(50), torch.full((50,), 4, dtype=torch.int32)
    want = simulator.step(seeds, positions)
    with torch.device("meta"):
        draft, got = simulator.draft(seeds, positions), simulator.step(seeds, positions)
    parts = (
        getattr(draft, name)
        for name in ("rows", "tokens", "parents", "offsets", "proposal_kinds", "dist_index", "row_of")
    )
    assert {part.device.type for part in parts} == {"cpu"}
    assert all((one == other).all() for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("vocab", [60, 3000])
def test_known_masses_change_no_draft(vocab: int) -> None:
    """Those of q bound what its deterministic tokens leave; a block that was all but theirs among them."""
    here = random_place(vocab, 2)
    here.q.logits[0, 7] += 12.0
    q = dists_of_logits(here.q.logits)
    assert q.mass is not None
    rows = torch.arange(400), torch.full((400,), 4, dtype=torch.int32)
    drafts = [
        Simulator(get_rule("recursive_rejection"), here.p, dist, Layout(TREE, "hybrid")).draft(*rows).tokens
        for dist in (q, TokenDistributions(q.logits, *q.stats))
    ]
    assert torch.equal(*drafts) and len(drafts[0].view(400, -1)[:, 1].unique()) > 20


@pytest.mark.parametrize("pick", ["without", "hybrid", "iid"])
def test_siblings_have_the_distributions_of_their_marks(pick: str) -> None:
    here = random_place(12, 2)
    simulator = Simulator(get_rule("replay"), here.p, here.q, Layout(TREE, pick))
    count = 30_000
    draft = simulator.draft(torch.arange(count), torch.full((count,), 4, dtype=torch.int32))
    tokens = draft.tokens.view(count, len(TREE)).numpy()
    q = here.draft
    first, second = tokens[:, 1], tokens[:, 2]
    pairs = np.zeros((12, 12))
    np.add.at(pairs, (first, second), 1)
    if pick == "iid":
        dist = np.outer(q, q)
    elif pick == "without":
        dist = np.outer(q, q) / (1 - q)[:, None]
        np.fill_diagonal(dist, 0)
    else:
        best = int(q.argmax())
        dist = np.zeros((12, 12))
        dist[:, best] = q / (1 - q[best])
        dist[best] = 0
        assert set(second) == {best} == set(simulator.deterministic_tokens)
    assert draw_counts.chi_square(pairs.astype(np.int64).ravel(), (dist / dist.sum()).ravel()).p_value > 1e-4


def test_coupled_matches_are_those_of_the_definition() -> None:
    here = random_place(30, 4, masked=3)
    p, q = here.base, here.draft
    with np.errstate(divide="ignore", invalid="ignore"):
        want = np.array([0 if p[x] * q[x] == 0 else 1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(30)])
    assert np.allclose(coupled_matches(p, q), want, atol=1e-14)
    assert np.allclose(coupled_matches(p, p), p, atol=1e-14)


def test_branches_add_up_to_p() -> None:
    here = random_place(40, 5)
    for name in RULES:
        simulator = Simulator(get_rule(name), here.p, here.q)
        found = branch_dists(simulator, here.base, here.draft)
        assert found is not None
        accepted, recovered = found
        assert np.allclose(accepted + recovered, here.base) and (recovered >= 0).all() and 0 < accepted.sum() < 1


@pytest.mark.parametrize("name", ["replay", "recursive_rejection"])
@pytest.mark.parametrize("pick", ["deterministic", "sampled", "hybrid", "iid"])
def test_branches_of_every_way_are_those_of_the_enumeration(name: str, pick: str) -> None:
    """The first token's accepted part, over all drafts of one level and all cells."""
    target, q = RationalModel(4, 114), RationalModel(4, 164)
    p_dist, q_dist = target.after(()), q.after(())
    layout = Layout((-1, 0) if pick == "sampled" else (-1, 0, 0), pick)
    simulator = Simulator(get_rule(name), packed_dists([p_dist]), packed_dists([q_dist]), layout)
    found = branch_dists(simulator, *(np.array([float(weight) for weight in dist]) for dist in (p_dist, q_dist)))
    proposal = {"iid": "sampled"}.get(pick, pick)
    trees = all_drafts((), q, q, proposal, (layout.parents,), POLICIES["full"])
    with use_backend("reference"):
        outcomes, rate = step_outcomes(get_rule(name), {(): trees}, target.after)[()]
    accepted = [sum(share for text, share in outcomes.items() if len(text) == 2 and text[0] == x) for x in range(4)]
    assert found is not None and found[0] == pytest.approx(accepted, abs=1e-6)
    assert found[0].sum() == pytest.approx(rate, abs=1e-6) and 0.1 < rate < 0.999


def test_groups_part_what_is_accepted_from_what_is_recovered() -> None:
    here = random_place(200, 6)
    group = groups_of(here.base, here.draft)
    assert set(group) == set(range(6))
    assert ((group < 3) == (here.base < here.draft)).all()
    mass = np.bincount(group, weights=here.base)
    assert mass.min() > 0.02


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_counts, "CHUNK", 1000)
    whole = Drawing(random_place(60, 0), get_rule("rejection"), seed=5)
    whole.run(5000)
    file = tmp_path / "here.npz"
    first = Drawing(random_place(60, 0), get_rule("rejection"), 5, file)

    def stop(count: int) -> None:
        if first.counts.draws >= 3000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run(5000, stop)
    second = Drawing(random_place(60, 0), get_rule("rejection"), 5, file)
    assert second.counts.draws == 3000
    second.run(5000)
    for name in (*draw_counts.VECTORS, "joint", "depth"):
        assert (getattr(second.counts, name) == getattr(whole.counts, name)).all(), name


def test_draws_of_another_run_are_not_mixed_in(tmp_path: Path) -> None:
    file = tmp_path / "here.npz"
    Drawing(random_place(60, 0), get_rule("rejection"), 5, file).run(500)
    for other in (
        lambda: Drawing(random_place(60, 1), get_rule("rejection"), 5, file),
        lambda: Drawing(random_place(60, 0), get_rule("replay"), 5, file),
        lambda: Drawing(random_place(60, 0), get_rule("rejection"), 6, file),
    ):
        with pytest.raises(ValueError, match="take another --out"):
            other()
    file.write_bytes(b"torn")
    with pytest.raises(ValueError, match="no counts of the lab"):
        Drawing(random_place(60, 0), get_rule("rejection"), 5, file)


def test_seeds_have_draws_of_their_own() -> None:
    """The largest seed's stay below those of the texts that show places; beyond it there are none left."""
    last = Drawing(random_place(60, 0), get_rule("rejection"), seed=SEEDS - 1)
    seen: list[int] = []
    step = last.simulator.step
    last.simulator.step = lambda seeds, at: (seen.extend(seeds.tolist()), step(seeds, at))[1]  # type: ignore[method-assign]
    last.run(100)
    assert (SEEDS - 1) << 40 <= min(seen) <= max(seen) < FIRST_SEED
    for seed in (-1, SEEDS):
        with pytest.raises(ValueError, match=f"got seed {seed}; expected 0..{SEEDS - 1}"):
            Drawing(random_place(60, 0), get_rule("rejection"), seed)


def test_masked_tokens_are_never_drawn() -> None:
    drawing = Drawing(random_place(60, 7, masked=20), get_rule("rejection"), seed=1)
    drawing.run(4000)
    assert drawing.counts.first[:20].sum() == 0 and drawing.counts.bonus[:20].sum() == 0


def test_large_vocabularies_get_a_shorter_coupled_chain() -> None:
    assert len(layout_for(get_rule("replay"), 1000).parents) == 3
    assert len(layout_for(get_rule("replay"), 32_000).parents) == 2
    assert len(layout_for(get_rule("rejection"), 32_000).parents) == 3


def test_a_draft_distribution_with_too_few_tokens_is_refused() -> None:
    one = dists_of_logits(torch.tensor([[0.0, float("-inf"), float("-inf")]]))
    with pytest.raises(ValueError, match="expected at least 2"):
        Simulator(get_rule("replay"), one, one, Layout(TREE, "without"))
