"""Checks of every operator on ordered proposals: extension against reference, keyed distribution, edges, errors.

`tests/kernels/test_recursive_rejection_verify.py` and `tests/kernels/test_traversal_verify.py` run it for their
operators.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from scipy import stats as statistics
from torch import Tensor

from oracles.proposal_cases import BAD, GOOD, decode, dist, error_of, fixed, int32, proposals, text_chances
from specdec_kernels import tree_plan, use_backend
from specdec_kernels.dispatch import extension

BACKENDS = ["reference"] + ([] if extension.unavailable_reason() else ["cpu"])
needs_extension = pytest.mark.skipif("cpu" not in BACKENDS, reason="CPU extension not built")
SHARED = [HealthCheck.differing_executors]  # one function that runs for two operators on purpose


def p_value(tokens: Tensor, p: Tensor) -> float:
    counts, chance = text_chances(p, tokens)
    assert counts[chance == 0].sum() == 0
    kept = chance > 0
    return float(statistics.chisquare(counts[kept].numpy(), (chance[kept] * len(tokens)).numpy()).pvalue)


def models() -> tuple[Tensor, Tensor]:
    """Returns distributions so different that trees fail often and uniforms below them are read."""
    g = torch.Generator().manual_seed(2)
    return torch.randn(3, 3, generator=g) * 2, torch.randn(3, 3, generator=g) * 2


class ProposalChecks:
    """Subclasses name the operator and its thresholds."""

    verify: ClassVar[Any]
    thresholds: ClassVar[Any]

    @needs_extension
    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=SHARED)
    @given(proposals())
    def test_extension_equals_reference(self, case: dict[str, Any]) -> None:
        with use_backend("reference"):
            want = self.verify(**case, max_depth=6)
            accept, residual = self.thresholds(**fixed(case))
        with use_backend("cpu"):
            got = self.verify(**case, max_depth=6)
            accept_cpu, residual_cpu = self.thresholds(**fixed(case))
        error = error_of(case)
        torch.testing.assert_close(accept_cpu, accept, rtol=64 * error, atol=16 * error)
        torch.testing.assert_close(residual_cpu, residual, rtol=64 * error, atol=16 * error)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_uniforms_are_compared_strictly_and_score_only_nodes_are_never_accepted(self, backend: str) -> None:
        """A uniform equal to the threshold rejects, so a token of probability zero is never accepted."""
        inf = float("inf")
        tree = {**GOOD, "target": dist(torch.tensor([[0.0, -inf, 0.0, 0.0]] + [[0.0] * 4] * 3))}
        with use_backend(backend):
            accept, residual = self.thresholds(**fixed(tree))
            assert accept[0] == 1 and accept[1] == 0 and residual[0, 1] == 0
            path, accepted, _ = self.verify(**{**tree, "uniforms": torch.tensor([0.0, 0.0, 0.9, 0.0])})
            assert accepted.tolist() == [0] and path.tolist() == [[0, -1, -1]]
            tree = GOOD
            threshold = self.thresholds(**fixed(tree))[0][2]
            for uniform, want in ((threshold, 0), (torch.nextafter(threshold, torch.zeros(())), 1)):
                uniforms = torch.tensor([0.0, 1.0, float(uniform), 1.0])
                assert self.verify(**{**tree, "uniforms": uniforms})[1].tolist() == [want if threshold > 0 else 0]
            for score_only_node in (1, 2, 3):
                score_only = torch.arange(4) == score_only_node
                path = self.verify(**{**tree, "score_only": score_only, "uniforms": torch.zeros(4)})[0]
                assert score_only_node not in path
                assert self.thresholds(**fixed({**tree, "score_only": score_only}))[0][score_only_node] == 0

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_thresholds_take_no_randomness_and_verification_needs_it(self, backend: str) -> None:
        with use_backend(backend):
            with pytest.raises(TypeError, match="seeds"):
                self.thresholds(**fixed(GOOD), seeds=GOOD["seeds"])
            with pytest.raises(TypeError, match="seeds"):
                self.verify(**{name: value for name, value in GOOD.items() if name != "seeds"})

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_greedy_rows_match_tokens(self, backend: str) -> None:
        level = torch.randn(5, 50)
        best = level.argmax(1)
        tokens = torch.stack([best[0], (best[0] + 1) % 50, best[0], (best[2] + 1) % 50, best[2]])
        with use_backend(backend):
            path, accepted, token = self.verify(
                tokens, int32([0, 5]), int32([1, -1, 3, -1, -1]), int32([-1, 2, -1, 4, -1]),
                torch.tensor([0, 0, 1, 2, 0], dtype=torch.int8), int32([-1, -1, 0, 1, -1]), dist(level, 0.0),
                dist(torch.zeros(2, 50)), None, None, torch.tensor([9]), int32([2]), max_depth=4,
            )  # fmt: skip
        assert path.tolist() == [[0, 2, 4, -1, -1]] and accepted.tolist() == [2] and token.tolist() == [int(best[4])]

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_drafts_may_be_deeper_than_a_stack(self, backend: str) -> None:
        nodes = 2_000 if backend == "reference" else 150_000
        links = torch.arange(1, nodes + 1, dtype=torch.int32)
        links[-1] = -1
        with use_backend(backend):
            path, accepted, token = self.verify(
                torch.ones(nodes, dtype=torch.int64), int32([0, nodes]), links, torch.full_like(links, -1),
                torch.zeros(nodes, dtype=torch.int8), torch.full_like(links, -1),
                dist(torch.tensor([[-90.0, 0.0]]).repeat(nodes, 1)), None, None, None, torch.tensor([3]), int32([0]),
                torch.zeros(nodes), max_depth=nodes - 1,
            )  # fmt: skip
        assert torch.equal(path, torch.arange(nodes, dtype=torch.int32)[None])
        assert accepted.tolist() == [nodes - 1] and token.tolist() == [1]

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_rows_without_nodes_and_without_a_distribution(self, backend: str) -> None:
        level = torch.randn(3, 2000)
        level[1] = float("nan")
        none = int32([-1, -1, -1])
        with use_backend(backend):
            path, accepted, token = self.verify(
                torch.tensor([0, 0, 7]), int32([0, 0, 1, 3, 3]), int32([-1, 2, -1]), none,
                torch.zeros(3, dtype=torch.int8), none, dist(level), None, None, None, torch.arange(4),
                torch.zeros(4, dtype=torch.int32), max_depth=2,
            )  # fmt: skip
        assert path.tolist() == [[-1] * 3, [0, -1, -1], [1, -1, -1], [-1] * 3]
        assert accepted.tolist() == [0] * 4
        assert token.tolist()[0] == token.tolist()[3] == -1 and token[2] == 0

    @needs_extension
    def test_shared_distributions_equal_their_copies(self) -> None:
        """Most nodes share one distribution, so its weights are cached; some read the same logits at another
        temperature.
        """
        g = torch.Generator().manual_seed(5)
        rows, vocab = 32, 2500
        p = torch.randn(1, vocab, generator=g) * 2
        q = p + torch.randn(1, vocab, generator=g)
        row, group = torch.arange(rows), torch.arange(2 * rows)

        def shared(level: Tensor, hot: Tensor) -> tuple[Tensor, ...]:
            parts = zip(dist(level), dist(level, 2.0), strict=True)
            return tuple(torch.where(hot, b, a) if a.ndim == 1 else a.expand(len(hot), -1) for a, b in parts)

        def copied(dists: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (dists[0].contiguous(), *dists[1:])

        tokens = q[0].topk(6).indices[torch.randint(0, 6, (5 * rows,), generator=g)]
        offsets = torch.arange(0, 5 * rows + 1, 5, dtype=torch.int32)
        plan = tree_plan(int32([-1, 0, 0, 1, 1] * rows), offsets)
        marks = torch.tensor([[0, 3, 0, 2, 2], [0, 2, 2, 3, 0]], dtype=torch.int8)[row % 2].flatten()
        node = torch.arange(5 * rows)
        target, draft = shared(p, (node % 5 > 2) | (node // 5 % 5 == 3)), shared(q, group % 7 == 6)
        source = torch.stack([group[::2]] * 3 + [group[1::2]] * 2, 1).flatten().int()
        tree = (tokens, offsets, plan.first_child, plan.next_sibling, marks, source)
        found = []
        for backend, change in (("reference", tuple), ("cpu", tuple), ("cpu", copied)):
            with use_backend(backend):
                dists = change(target), change(draft)
                found.append(self.verify(*tree, *dists, None, None, row, row.int(), max_depth=2))
        for want, here, apart in zip(*found, strict=True):
            assert torch.equal(here, want) and torch.equal(here, apart)
        assert len(set(found[0][1].tolist())) == 3

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_row_is_the_same_alone_and_in_a_batch(self, backend: str) -> None:
        g = torch.Generator().manual_seed(2)
        rows, vocab = 6, 1500
        target, draft = dist(torch.randn(4 * rows, vocab, generator=g)), dist(torch.randn(rows, vocab, generator=g))
        tokens = torch.randint(0, 8, (4 * rows,), generator=g)
        first = torch.tensor([1, 3, -1, -1]).repeat(rows) + torch.arange(rows).repeat_interleave(4) * 4
        first = torch.where(torch.tensor([1, 1, 0, 0]).repeat(rows) == 1, first, -1).int()
        sibling = torch.full((4 * rows,), -1, dtype=torch.int32)
        sibling[1::4] = torch.arange(2, 4 * rows, 4, dtype=torch.int32)
        marks = torch.tensor([0, 3, 0, 1], dtype=torch.int8).repeat(rows)
        source = torch.arange(rows, dtype=torch.int32).repeat_interleave(4)
        offsets, seeds, at = torch.arange(0, 4 * rows + 1, 4, dtype=torch.int32), torch.arange(rows), int32([3] * rows)
        with use_backend(backend):
            whole = self.verify(
                tokens, offsets, first, sibling, marks, source, target, draft, None, None, seeds, at, max_depth=2
            )
            for row in range(rows):
                own = slice(4 * row, 4 * row + 4)
                links = [torch.where(part[own] >= 0, part[own] - 4 * row, -1).int() for part in (first, sibling)]
                path, accepted, token = self.verify(
                    tokens[own], int32([0, 4]), *links, marks[own], source[own], tuple(part[own] for part in target),
                    draft, None, None, seeds[row : row + 1], at[row : row + 1], max_depth=2,
                )  # fmt: skip
                assert torch.equal(torch.where(path[0] >= 0, path[0] + 4 * row, -1), whole[0][row])
                assert accepted[0] == whole[1][row] and token[0] == whole[2][row]

    @needs_extension
    def test_keyed_draws_have_the_joint_distribution_over_several_steps(self) -> None:
        """Uniforms or noise that are used twice, or shared between streams, change the joint distribution of four
        tokens.
        """
        p, q = models()
        with use_backend("cpu"):
            assert p_value(decode(self.verify, p, q, 60_000, 4), p) > 1e-3

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
    def test_errors_are_named(self, backend: str, change: dict[str, Any], message: str) -> None:
        with use_backend(backend):
            self.verify(**GOOD)
            with pytest.raises(ValueError, match=message):
                self.verify(**(GOOD | change))
