"""The SGLang plugin on tensors of SGLang's layout: inert unless asked, refusals in words, exact distributions."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles import fake_sglang as fake
from oracles.markov_texts import ROOT, SETTINGS, probs, sampled_chains, table, text_p_value

from specdec_fast.embedding import verify
from specdec_fast.integrations import sglang as plugin
from specdec_fast.integrations.sglang.hook import RULES
from specdec_fast.integrations.sglang.tree_sampler import TreeSampler, request_seeds

PARENTS = torch.tensor([-1, 0, 0, 1, 1, 2])
ROWS = 12_000
Patch = pytest.MonkeyPatch
VARIABLE = "SPECDEC_SGLANG_RULE"


def asked(patch: Patch, rule: str = "replay", version: str = fake.VERSION) -> tuple[fake.FakePackage, str]:
    made = fake.install(patch, version)
    patch.setenv(VARIABLE, rule)
    return made, plugin.register()


def test_it_is_inert_and_light_unless_asked() -> None:
    code = (
        "import sys, specdec_fast.integrations.sglang as plugin; print(plugin.register()); "
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'sglang', 'specdec_kernels')])"
    )
    own = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=own)
    assert done.stdout.splitlines() == ["SPECDEC_SGLANG_RULE is not set, so SGLang verifies drafts itself", "[]"]


def test_the_entry_point_is_declared() -> None:
    found = [each.value for each in metadata.entry_points(group="sglang.srt.plugins") if each.name == "specdec"]
    text = (fake.ROOT / "pyproject.toml").read_text()
    assert 'specdec = "specdec_fast.integrations.sglang:register"' in text
    assert found in ([], ["specdec_fast.integrations.sglang:register"])  # [] in a checkout that was installed before


def test_without_sglang_it_refuses(monkeypatch: Patch) -> None:
    monkeypatch.setenv(VARIABLE, "replay")
    if "sglang" not in sys.modules and not any(each.name == "sglang" for each in metadata.distributions()):
        assert "which runs on as before" in plugin.register()


@pytest.mark.parametrize(
    ("rule", "version", "words"),
    [
        ("ordered", fake.VERSION, "is now called 'recursive_rejection'"),
        ("typical", fake.VERSION, "got 'typical'; expected one of replay, recursive_rejection, traversal"),
        (
            "replay",
            "0.6.0",
            "got sglang 0.6.0; expected 0.5.23, whose tensors it knows; install that version",
        ),
        ("replay", "0.5.2", "got sglang 0.5.2"),
    ],
)
def test_refusals(rule: str, version: str, words: str, monkeypatch: Patch) -> None:
    made, said = asked(monkeypatch, rule, version)
    assert words in said and "SGLang, which runs on as before" in said and not made.hooks


def test_a_patched_function_and_another_plugin_are_refused(monkeypatch: Patch) -> None:
    made, said = asked(monkeypatch)
    assert said == "specdec-fast verifies the drafts of SGLang by rule replay" and len(made.hooks) == 1
    assert "got another hook on sglang.srt.speculative.eagle_utils.eagle_sample" in plugin.register()
    assert [len(hooks) for hooks in made.hooks.values()] == [1]
    made.hooks.clear()
    vars(made.modules["sglang.srt.speculative.eagle_utils"])["eagle_sample"] = lambda verify_input, batch: None
    assert "got eagle_sample(verify_input, batch); expected (verify_input, batch, logits_output," in plugin.register()
    assert not made.hooks
    _, said = asked(monkeypatch, version=f"{fake.VERSION}.post1")
    assert "by rule replay" in said


def tree_batch(settings: dict[str, float]) -> tuple[Any, ...]:
    """Trees of the likeliest tokens, as SGLang drafts them, over the Markov target."""
    target = table(5)
    tokens = torch.full((ROWS, len(PARENTS)), ROOT)
    for first, count in ((1, 2), (3, 2), (5, 1)):
        top = target[tokens[:, PARENTS[first]]].topk(2).indices
        tokens[:, first : first + count] = top[:, :count]
    own: dict[str, Any] = {
        "temperatures": torch.full((ROWS, 1), settings.get("temperature", 1.0)),
        "top_ks": torch.full((ROWS,), int(settings.get("top_k", 1 << 30)), dtype=torch.int32),
        "top_ps": torch.full((ROWS,), settings.get("top_p", 1.0)),
        "min_ps": torch.full((ROWS,), settings.get("min_p", 0.0)),
        "need_top_k_sampling": "top_k" in settings,
        "need_top_p_sampling": "top_p" in settings,
        "need_min_p_sampling": "min_p" in settings,
    }
    lengths = [7 + row % 3 for row in range(ROWS)]
    logits = fake.logits_output(target[tokens.flatten()])
    return (
        fake.verify_input(PARENTS.expand(ROWS, -1), tokens, max_tree_depth=3),
        fake.batch(lengths, **own),
        logits,
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("settings", ["plain", "top-k", "min-p"])
def test_the_distribution_of_trees_is_exact(rule: str, settings: str, monkeypatch: Patch) -> None:
    made, _ = asked(monkeypatch, rule)
    answer = made.apply()(*tree_batch(SETTINGS[settings]))
    assert [part.dtype for part in answer] == [torch.int32] * 3
    assert [tuple(part.shape) for part in answer] == [(ROWS * len(PARENTS),), (ROWS,), (ROWS, 3)]
    out = fake.emitted(answer)
    assert text_p_value(out, probs(table(5), SETTINGS[settings])) > 1e-3
    assert 1.4 < float(answer[1].float().mean()) < 3


@pytest.mark.parametrize("rule", ["recursive_rejection", "traversal"])
def test_the_distribution_of_sampled_chains_is_exact(rule: str, monkeypatch: Patch) -> None:
    """SGLang's rejection sampling: chains, with what each token was sampled from."""
    made, _ = asked(monkeypatch, rule)
    chains, q = sampled_chains(probs(table(51), {"temperature": 0.8}), ROWS, 1)
    tokens = torch.cat([torch.full((ROWS, 1), ROOT), chains], 1)
    given = fake.verify_input(torch.arange(-1, 2).expand(ROWS, 3), tokens, draft_probs=q)
    answer = made.apply()(given, fake.batch([9] * ROWS), fake.logits_output(table(5)[tokens.flatten()]))
    assert text_p_value(fake.emitted(answer), probs(table(5), {})) > 1e-3
    wrong = fake.verify_input(torch.arange(-1, 2).expand(ROWS, 3), tokens, draft_probs=q.roll(1, 0))
    answer = made.apply()(wrong, fake.batch([9] * ROWS), fake.logits_output(table(5)[tokens.flatten()]))
    assert text_p_value(fake.emitted(answer), probs(table(5), {})) < 1e-6


def worst_of_three(made: Any) -> float:
    """The least p value of three requests with equal seeds, each of which drafts the text of the one before."""
    target, seeds, found = table(5), torch.arange(ROWS) + 42, []
    text = target[ROOT].argmax().expand(ROWS, 2)
    for number in range(3):
        tokens = torch.cat([torch.full((ROWS, 1), ROOT), text], 1)
        given = fake.verify_input(torch.arange(-1, 2).expand(ROWS, 3), tokens)
        own = fake.batch([9] * ROWS, [f"{number}/{row}" for row in range(ROWS)], sampling_seed=seeds)
        out = fake.emitted(made.apply()(given, own, fake.logits_output(target[tokens.flatten()])))
        found.append(text_p_value(out, probs(target, {})))
        text = torch.where(out[:, :2] < 0, tokens[:, 1:], out[:, :2].long())
    return min(found)


@pytest.mark.parametrize("rule", RULES)
def test_drafts_of_a_request_with_the_same_seed(rule: str, monkeypatch: Patch) -> None:
    """NGRAM drafts what earlier requests emitted, and deterministic inference gives all of them one seed."""
    made, _ = asked(monkeypatch, rule)
    assert (worst_of_three(made) < 1e-6) is (rule != "replay"), "the seed alone"
    for made.settings.speculative_algorithm in ("NGRAM", "of a plugin"):
        assert worst_of_three(made) > 1e-3


def greedy_walk(given: Any, choice: list[int]) -> tuple[list[int], list[int], list[list[int]]]:
    """SGLang's documented greedy verification, by a walk over its own links."""
    rows, nodes = given.retrieve_index.shape
    tokens, index = given.draft_token.tolist(), given.retrieve_index.tolist()
    predict, lengths, accepted = [0] * (rows * nodes), [], []
    for row in range(rows):
        path, at = [index[row][0]], 0
        for _ in range(given.max_tree_depth - 1):
            child = int(given.retrieve_next_token[row, at])
            while child >= 0 and tokens[row * nodes + child] != choice[path[-1]]:
                child = int(given.retrieve_next_sibling[row, child])
            if child < 0:
                break
            predict[path[-1]] = choice[path[-1]]
            path.append(index[row][child])
            at = child
        predict[path[-1]] = choice[path[-1]]
        lengths.append(len(path))
        accepted.append(path + [-1] * (given.max_tree_depth - len(path)))
    return predict, lengths, accepted


@pytest.mark.parametrize("rule", RULES)
def test_greedy_batches_have_sglang_s_own_answer(rule: str, monkeypatch: Patch) -> None:
    """All three tensors, in ragged trees with nodes that no link leads to. SGLang writes temperature 0 as top-k 1."""
    made, _ = asked(monkeypatch, rule)
    source, generator = random.Random(1), torch.Generator().manual_seed(1)
    rows, nodes, vocab = 30, 10, 4
    trees = [[-1, *(source.randrange(node) for node in range(1, 8)), -1, -1] for _ in range(rows)]
    tokens = torch.randint(0, vocab, (rows, nodes), generator=generator)
    logits = torch.randn(rows * nodes, vocab, generator=generator)
    given = fake.verify_input(torch.tensor(trees), tokens)
    cold: dict[str, Any] = {"top_ks": torch.ones(rows, dtype=torch.int32), "need_top_k_sampling": True}
    answer = made.apply()(given, fake.batch([5] * rows, **cold), fake.logits_output(logits))
    want = greedy_walk(given, logits.argmax(1).tolist())
    assert [part.tolist() for part in answer] == list(want) and max(want[1]) > 2


def test_replay_does_not_depend_on_the_tree(monkeypatch: Patch) -> None:
    """Drafts change how many tokens a step emits, and nothing else: the tokens are those of plain sampling."""
    made, _ = asked(monkeypatch)
    given, own, logits = tree_batch({"temperature": 0.8})
    out = fake.emitted(made.apply()(given, own, logits))
    seeds = request_seeds(own, "replay", torch.device("cpu"))
    plain = torch.full((ROWS, 1), ROOT)
    for at in range(3):
        drafted = torch.empty(ROWS, 0, dtype=torch.long)
        positions = own.seq_lens + at
        step = verify(
            table(5)[plain[:, -1:]], drafted, rule="replay", seeds=seeds, positions=positions, temperature=0.8
        )
        plain = torch.cat([plain, step], 1)
    assert torch.equal(out, torch.where(out >= 0, plain[:, 1:], -1).to(out.dtype))


def test_seeds_are_the_same_on_every_rank(monkeypatch: Patch) -> None:
    """Ranks with other global generators, and batches in another order, give every request the same tokens."""
    made, _ = asked(monkeypatch)
    tokens, parents = torch.tensor([[0, 1, 2]] * 4), torch.tensor([[-1, 0, 0]] * 4)
    logits = torch.randn(12, 50, generator=torch.Generator().manual_seed(1))
    rids = [f"r{row}" for row in range(4)]

    def answer(rank: int, order: list[int], **changes: Any) -> dict[str, list[int]]:
        torch.manual_seed(rank)
        random.seed(rank)
        own = fake.batch([6] * 4, [rids[row] for row in order], **changes)
        own_logits = logits.view(4, 3, 50)[order].reshape(12, 50)
        found = made.apply()(fake.verify_input(parents, tokens), own, fake.logits_output(own_logits))
        return dict(zip((rids[row] for row in order), fake.emitted(found).tolist()))

    first = answer(0, [0, 1, 2, 3])
    assert answer(1, [3, 1, 0, 2]) == first
    seeded = torch.tensor([42, 43, 42, 7])
    assert answer(0, [0, 1, 2, 3], sampling_seed=seeded) == answer(1, [0, 1, 2, 3], sampling_seed=seeded) != first
    made.group = fake.Group(world_size=2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flag, op, group: None)
    answer(0, [0, 1, 2, 3])
    assert [src for _, src in made.group.sent] == [0, 0, 0]


def test_penalties_biases_and_grammars_apply_as_in_sglang(monkeypatch: Patch) -> None:
    made, _ = asked(monkeypatch)
    rows, nodes, vocab = 3, 2, 6
    tokens, parents = torch.tensor([[0, 1]] * rows), torch.tensor([[-1, 0]] * rows)
    logits = torch.randn(rows * nodes, vocab, generator=torch.Generator().manual_seed(2))
    additive, scaling = torch.zeros(rows, vocab), torch.ones(rows, vocab)
    additive[0, 2], scaling[1], bias = -9.0, 2.0, torch.zeros(rows, vocab)
    bias[2, 5] = 50.0

    def ban(changed: torch.Tensor) -> None:
        changed[:, 0] = -torch.inf

    before, given = logits.clone(), fake.logits_output(logits)
    changes: dict[str, Any] = {
        "acc_additive_penalties": additive, "acc_scaling_penalties": scaling, "logit_bias": bias,
        "top_ks": torch.ones(rows, dtype=torch.int32), "need_top_k_sampling": True,
    }  # fmt: skip
    answer = made.apply()(
        fake.verify_input(parents, tokens), fake.batch([4] * rows, **changes), given, SimpleNamespace(apply=ban)
    )
    want = before + additive.repeat_interleave(nodes, 0)
    factors = scaling.repeat_interleave(nodes, 0)
    want = torch.where(want < 0, want * factors, want / factors) + bias.repeat_interleave(nodes, 0)
    want[:, 0] = -torch.inf
    assert torch.equal(given.next_token_logits, want) and torch.equal(logits, before)
    assert fake.emitted(answer)[:, 0].tolist() == want[::nodes].argmax(1).tolist()


def test_what_the_rule_cannot_serve_goes_to_sglang(monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is lost: SGLang gets the logits as they were, and each reason is logged once."""
    made, _ = asked(monkeypatch)
    tokens, parents = torch.tensor([[0, 1]]), torch.tensor([[-1, 0]])
    logits = torch.zeros(2, 4)

    def call(own: Any = None, given: Any = None, mask: Any = None, *rest: Any, **options: Any) -> Any:
        own = fake.batch([3]) if own is None else own
        given = fake.verify_input(parents, tokens) if given is None else given
        return made.apply()(given, own, fake.logits_output(logits), mask, *rest, **options)

    assert call()[0] != "SGLang" and call(None, None, None, None)[0] != "SGLang"

    def explode(changed: torch.Tensor) -> None:
        changed.fill_(7.0)
        raise RuntimeError("no mask")

    for _ in range(2):
        name, seen = call(mask=SimpleNamespace(apply=explode))
        assert name == "SGLang" and torch.equal(seen, torch.zeros(2, 4))
    assert caplog.text.count("RuntimeError: no mask") == 1 and "not rule replay" in caplog.text
    idle = fake.batch([3])
    idle.forward_mode = SimpleNamespace(is_idle=lambda: True)
    assert call(idle)[0] == "SGLang" and "idle" not in caplog.text
    assert call(uno_target_max_top_k=3)[0] == "SGLang" and "UNO" in caplog.text
    assert call(None, None, None, 3)[0] == "SGLang"
    assert call(fake.batch([3], has_watermark_candidates=True), watermark_state=object())[0] == "SGLang"
    assert call(given=fake.verify_input(parents, torch.tensor([[0, 9]])))[0] != "SGLang"  # 9 is never accepted
    made.settings.speculative_accept_threshold_single = 0.9
    assert call()[0] == "SGLang" and "which are approximate; expected 1" in caplog.text
    made.settings.speculative_accept_threshold_single = 1.0
    vars(made.modules["sglang.srt.speculative.spec_utils"])["SIMULATE_ACC_LEN"] = 2
    assert call()[0] == "SGLang" and "SGLANG_SIMULATE_ACC_LEN" in caplog.text
    vars(made.modules["sglang.srt.speculative.spec_utils"])["SIMULATE_ACC_LEN"] = -1
    assert call()[0] != "SGLang"


class TwoRanks(fake.Group):
    """Two ranks as threads, whose collective operations wait for each other."""

    def __init__(self) -> None:
        super().__init__(world_size=2)
        self.own, self._wait = threading.local(), threading.Barrier(2, timeout=20)
        self._parts: list[Any] = [None, None]

    def exchange(self, part: torch.Tensor) -> list[torch.Tensor]:
        self._parts[self.own.rank] = part.clone()
        self._wait.wait()
        found = list(self._parts)
        self._wait.wait()
        return found

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        tensor.copy_(self.exchange(tensor)[src])

    def all_reduce(self, tensor: torch.Tensor, op: Any, group: Any) -> None:
        tensor.copy_(torch.minimum(*self.exchange(tensor)))


@pytest.mark.parametrize("fails", [0, 1])
def test_a_rank_that_fails_takes_the_others_along(fails: int, monkeypatch: Patch) -> None:
    """All of them go to SGLang's function for that batch, and the next one is served."""
    made, _ = asked(monkeypatch)
    made.group = group = TwoRanks()
    monkeypatch.setattr(torch.distributed, "all_reduce", group.all_reduce)

    def ban(changed: torch.Tensor) -> None:
        if group.own.rank == fails:
            raise RuntimeError("no memory")

    def rank_of_two(rank: int) -> tuple[bool, list[Any]]:
        group.own.rank = rank
        given = fake.verify_input(torch.tensor([[-1, 0]]), torch.tensor([[0, 1]]))
        logits = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
        first = made.apply()(given, fake.batch([3]), fake.logits_output(logits), SimpleNamespace(apply=ban))
        second = made.apply()(given, fake.batch([3]), fake.logits_output(logits))
        return first[0] == "SGLang", [part.tolist() for part in second]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank_of_two, range(2))
    assert first == second and first[0] is True


def test_logits_without_a_number_are_cleaned_as_sglang_does(monkeypatch: Patch) -> None:
    made, _ = asked(monkeypatch)
    logits = torch.full((2, 4), torch.nan)
    logits[0, 2] = 1.0
    given = fake.verify_input(torch.tensor([[-1, 0]]), torch.tensor([[0, 1]]))
    answer = made.apply()(given, fake.batch([3]), fake.logits_output(logits))
    assert fake.emitted(answer)[0, 0] == 2


def test_the_sampler_names_its_rule() -> None:
    assert {TreeSampler(rule).rule for rule in RULES} == set(RULES)
