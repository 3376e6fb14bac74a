"""Places, greedy texts, the acceptance table and the report on a tiny pair; what does not hold is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles.planted_rules import AlteredRule, random_place

from specdec_fast.engine.engine import Engine
from specdec_fast.lab.exact_distributions import has_a_dist, own_rules, takes_trees
from specdec_fast.lab.foreign_samples import Recorded
from specdec_fast.lab.greedy_texts import GreedyText, compare_greedy
from specdec_fast.lab.kill_matrix import Killed
from specdec_fast.lab.report import ARTICLE, finite, other_settings, short, write_report
from specdec_fast.lab.rule_acceptance import by_shape, compare_rules
from specdec_fast.lab.run import Figure, Lab, slug
from specdec_fast.lab.sequential_test import Ledger
from specdec_fast.lab.text_positions import KINDS, Recorder, find_places, plain_logits
from specdec_fast.loading import load
from specdec_fast.rules import get_rule
from specdec_fast.sampling.params import SamplingParams
from specdec_fast.targets.tiny_models import tiny_model

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=24, seed=3)


def engine(
    rule: str = "rejection", noise: float = 0.05, dtype: torch.dtype = torch.float32, std: float = 1.5
) -> Engine:
    target, draft = tiny_model("llama", logit_std=std), tiny_model("llama", logit_std=std)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * noise)
    return load(target.to(dtype), draft.to(dtype), rule=rule, num_draft_tokens=2, eos_token_ids=())


PROMPTS: Any = [("a", [5, 6, 7, 8]), ("b", [9, 3])]


@pytest.mark.parametrize("rule", ["rejection", "replay"])
def test_places_went_through_verification(rule: str) -> None:
    made = engine(rule)
    found = find_places(made, PROMPTS, PARAMS)
    assert found.missing == [] and [each.kind for each in found.places] == [*KINDS, *KINDS]
    assert made.rule is get_rule(rule) and made.idle and made.target.cache.pages.num_used == 0
    for each in found.places:
        assert each.row_error < 1e-4 and each.holds and each.allowed == 1e-3
        assert np.allclose(each.p.probs()[0].double().numpy(), each.base, atol=1e-6)
        again = plain_logits(made.target, each.tokens)
        assert np.isclose((each.p.logits[0] - again).abs().max(), each.row_error, rtol=0.1)
        assert np.allclose(each.base, torch.softmax(again.double(), 0), atol=1e-5)
        small = torch.softmax(plain_logits(made.drafter.model, each.tokens).double(), 0).numpy()
        assert np.allclose(each.draft, small, atol=1e-9)
        assert list(each.tokens[:2]) in ([5, 6], [9, 3])


def test_the_recorder_changes_nothing() -> None:
    made = engine()
    plain = made.generate([PROMPTS[0][1]], PARAMS)[0].tokens
    recorder = Recorder(made.rule)
    made.rule = recorder
    assert made.generate([PROMPTS[0][1]], PARAMS)[0].tokens == plain
    assert len(recorder.steps) > 3 and recorder.name == "rejection"


def test_a_pair_without_a_draft_is_refused() -> None:
    alone = load(tiny_model("llama"), drafter="none", eos_token_ids=())
    with pytest.raises(ValueError, match="got drafter none, which has no distribution of its own"):
        find_places(alone, PROMPTS, PARAMS)


def test_greedy_texts_are_identical() -> None:
    found = compare_greedy(engine("rejection"), PROMPTS, (4, 12))
    assert len(found) == 4 and all(each.identical and each.holds for each in found)
    assert {each.tokens for each in found} == {4, 12}


def second_best(found: Any, draft: Any, dists: Any, rng: Any) -> Any:
    """From position 6 on a step with drafts ends with the second best token."""
    last = found.path.gather(1, found.num_accepted[:, None].long()).squeeze(1)
    second = dists.logits[last.long()].float().topk(2).indices[:, 1]
    late = rng.positions >= 6 if draft.num_nodes > draft.num_rows else rng.positions < 0
    return type(found)(found.path, found.num_accepted, torch.where(late, second, found.next_token))


def test_a_greedy_difference_is_found_with_its_gap() -> None:
    made = engine("greedy")
    made.rule = AlteredRule(made.rule, acceptance=second_best)
    found = compare_greedy(made, PROMPTS, (12,))
    assert not any(each.identical or each.holds for each in found)
    assert all(each.gap is not None and each.gap > each.allowed for each in found)


def test_half_precision_may_part_at_near_ties_only() -> None:
    """bfloat16: texts are equal or part within rounding. The second best token is a fault unless it is as good."""
    for text in compare_greedy(engine("greedy", dtype=torch.bfloat16), PROMPTS, (32,)):
        assert text.dtype == "bfloat16" and text.allowed == 0.5 and text.holds
    for std, fault in ((8.0, True), (0.05, False)):
        made = engine("greedy", dtype=torch.bfloat16, std=std)
        made.rule = AlteredRule(made.rule, acceptance=second_best)
        for text in compare_greedy(made, PROMPTS, (12,)):
            assert not text.identical and text.gap is not None and text.holds != fault
            assert (text.gap > 0.5) == fault


def test_rules_are_ranked_as_theory_says() -> None:
    names = own_rules()
    rows = compare_rules(names, [random_place(50, seed) for seed in range(3)], steps=1500)
    mean = {(row.rule, row.proposals): row.mean for row in rows}
    half = max(row.half for row in rows)
    assert {row.rule for row in rows} == {name for name in names if has_a_dist(get_rule(name))}
    if "block" in names:
        assert mean["block", "chain"] > mean["rejection", "chain"] - half
    for name in names:
        if takes_trees(get_rule(name)) and get_rule(name).uses_q:
            assert mean[name, "tree, hybrid"] > mean[name, "tree, without replacement"] - half
            assert mean[name, "tree, without replacement"] > mean[name, "tree, independent"] - half
    shapes = by_shape(rows)
    assert [title.split(",")[0] for title, _ in shapes] == ["chains of 6 tokens", "trees of 6 tokens on 2 levels"]
    for (_, own), depth in zip(shapes, (6, 2), strict=True):
        assert [row.mean for row in own] == sorted((row.mean for row in own), reverse=True)
        assert all(row.depth == depth >= row.mean and ("tree" in row.proposals) == (depth == 2) for row in own)
    assert [row for _, own in shapes for row in own] == rows


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    made = engine()
    run = Lab(tmp_path_factory.mktemp("lab"), seed=2)
    run.header = {"model": "tiny <b>", "rule": "rejection", "versions": {"torch": torch.__version__}}
    run.run_greedy(made, PROMPTS[:1], (6,))
    run.run_draws(made, PROMPTS[:1], PARAMS, 3000)
    run.run_acceptances(200)
    run.add_to_ledger(Ledger())
    run.mutants = [Killed("m", "o", 0.1, 0.2, 100.0, float("inf"), ("exact, joint",))]
    run.draw_figures(None)
    return run


def test_the_report_is_one_page_with_its_pictures(done: Lab) -> None:
    page = write_report(done)
    text = page.read_text("utf-8")
    assert done.failures == []
    pictures = re.findall(r'src="data:image/png;base64,([A-Za-z0-9+/=]+)"', text)
    assert len(pictures) == len(done.figures) + len(done.proof) == 3 + 1 + 6
    assert not re.search(r'(src|href)="(?!data:)', text), "the page must not need anything else"
    assert "tiny &lt;b&gt;" in text and "Passed: all checks hold" in text
    assert "9.694e-05" in text and f"{ARTICLE:.3e}" == "9.694e-05"
    for judged in done.judged:
        assert judged.test.name in text
    assert f"in red: {done.bars_outside} of {done.bars} in these panels" in text
    for word in ("production operators", "Overlap", "<dt>row error</dt>", "<dt>proposals</dt>"):
        assert word in text
    assert "<dt>alpha*</dt>" not in text and not done.exact, "a word of exact distributions"
    order = [f"<td>{row.rule}</td><td>{row.proposals}</td>" for row in done.acceptances]
    assert len(done.acceptances) > 8 and sorted(order, key=text.index) == order, "the chart has this order"
    assert text.index("Chains of 6 tokens, at most 6") < text.index("Trees of 6 tokens on 2 levels, at most 2")
    data = json.loads((done.out / "report.json").read_text("utf-8"))
    assert data["holds"] and len(data["tests"]) == len(done.judged) == 24
    assert data["mutants"][0]["draws_joint"] is None
    for name in data["figures"]:
        assert (done.out / name).stat().st_size > 2000


def test_bars_outside_of_their_bands_are_counted(tmp_path: Path) -> None:
    dist = np.full(20, 0.05)
    wrong = np.array([0.08, 0.02, *dist[2:]])
    for drawn, outside in ((dist, 0), (wrong, 2)):
        run = Lab(tmp_path)
        run.run_recorded(Recorded.make(np.random.default_rng(3).choice(20, 20_000, p=drawn), dist))
        assert (run.bars, run.bars_outside) == (20, outside)
        assert f"{outside} of 20 bars outside" in run.figures[0].caption
        page = write_report(run).read_text("utf-8")
        assert ("Chance does not explain" in page) == (outside > 0) != ("is therefore no evidence" in page)
        for ours in ("production operators", "Overlap", "row error", "alpha*", "9.694", "after a rejection"):
            assert ours not in page, "nothing of this engine drew these"
        level = 0.001 / len(run.judged)
        assert f"rejected below {level:.3g}" in page


def test_an_earlier_report_is_replaced_with_its_pictures(tmp_path: Path) -> None:
    """Only what it lists: files of others stay, whatever a list says."""
    keep = [tmp_path / "figures" / "mine.png", tmp_path / "mine.png", tmp_path.parent / "mine.png"]
    (tmp_path / "figures").mkdir()
    for file in keep:
        file.write_text("mine")
    first = Lab(tmp_path, header={"model": "a", "seed": 1, "draws": 5, "versions": {"torch": "1"}})
    assert other_settings(tmp_path, first.header) == []
    first.figures = [Figure(name, "", b"png") for name in ("gone", "stays")]
    write_report(first)
    report = json.loads((tmp_path / "report.json").read_text())
    report["figures"] += ["mine.png", "../mine.png", "figures/../mine.png", 3]
    (tmp_path / "report.json").write_text(json.dumps(report))
    more = first.header | {"draws": 9, "versions": {}}
    assert other_settings(tmp_path, more) == []
    other = {"model": "b", "seed": 2}
    assert other_settings(tmp_path, other, ["seed"]) == ["model a, now b"]
    assert other_settings(tmp_path, {"recorded": "x"}) == [
        "model a, now None",
        "seed 1, now None",
        "recorded None, now x",
    ]
    second = Lab(tmp_path, header=other, figures=[Figure("stays", "", b"png")])
    write_report(second)
    assert sorted(file.name for file in (tmp_path / "figures").iterdir()) == ["mine.png", "stays.png"]
    assert all(file.read_text() == "mine" for file in keep)


@pytest.mark.parametrize("text", ["", "[1]", '{"figures": ["figures/mine.png"]}', None])
def test_what_is_no_report_of_ours_lists_nothing(text: str | None, tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "mine.png").write_text("mine")
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    assert other_settings(tmp_path, {"model": "a"}) == []
    write_report(Lab(tmp_path))
    assert (tmp_path / "figures" / "mine.png").exists()


def test_what_does_not_hold_is_said_with_its_bins(tmp_path: Path) -> None:
    dist = np.full(20, 0.05)
    wrong = dist.copy()
    wrong[3], wrong[4] = 0.08, 0.02
    run = Lab(tmp_path)
    run.run_recorded(Recorded.make(np.random.default_rng(0).choice(20, 20_000, p=wrong), dist))
    lines = run.failures
    assert any("distribution rejected: recorded, context 0, chi-square" in line for line in lines)
    assert {line.split(":")[0].strip() for line in lines if "  bin" in line} >= {"bin 3", "bin 4"}
    run.mutants = [Killed("m", "o", 0.0, 0.0, float("inf"), float("inf"), ())]
    run.greedy = [GreedyText("a", 4, "float32", 4, 2, 3.0, 1.0, 1e-3)]
    assert "mutant survived: m" in run.failures and any("first difference at token 2" in line for line in run.failures)
    page = write_report(run).read_text("utf-8")
    assert "at least one check does not hold" in page and "bin 3" in page


def test_all_tests_of_a_run_share_one_level(tmp_path: Path) -> None:
    """Two hundred contexts, all right: nothing is rejected, though single p-values are small."""
    source = np.random.default_rng(1)
    dists = source.dirichlet(np.full(8, 1.0), size=200)
    context = np.repeat(np.arange(200), 400)
    tokens = np.concatenate([source.choice(8, 400, p=dist) for dist in dists])
    run = Lab(tmp_path)
    run.run_recorded(Recorded.make(tokens, dists, context=context))
    assert min(each.test.p_value for each in run.judged) < 0.02 and run.failures == []


def test_numbers_are_printed_for_people_and_for_json() -> None:
    assert [short(value) for value in (None, float("inf"), 1e6, 0.25, 1.23456e-7)] == [
        "\u2013", "\u221e", "1,000,000", "0.25", "1.23e-07",
    ]  # fmt: skip
    assert finite({"a": [float("nan"), 1.0], "b": (float("inf"),)}) == {"a": [None, 1.0], "b": [None]}
    assert slug("Prose wells/after a rejection") == "prose-wells-after-a-rejection" and slug("//") == "unnamed"
