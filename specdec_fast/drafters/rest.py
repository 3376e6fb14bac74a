"""REST: drafts trees of the continuations that a datastore of text has for the newest tokens (He et al. 2023).

Needs no model, but a datastore: `specdec datastore build`. The longest suffix that any datastore contains is looked up.
Its continuations are counted over all datastores, and the most frequent prefixes form the tree.
Tests: tests/drafters/test_rest.py and the contract suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec_fast.core.draft import Draft
from specdec_fast.core.proposal_kind import check_pick
from specdec_fast.interfaces import Acceptance, Budget, DrafterParts, Needs, Rng, StateView, TargetOutput
from specdec_fast.retrieval.datastore import Datastore
from specdec_fast.retrieval.suffix_index import structures
from specdec_fast.retrieval.tokenizer_fingerprint import fingerprint


class RestDrafter:
    """Drafts the most frequent continuations in datastores, as a tree.

    Args:
        num_draft_tokens: Default budget per row.
        datastore: A path, an open `Datastore`, or several of them.
        max_match: Longest suffix that is looked up.
        min_match: Shortest suffix that is looked up.
        depth: Depth limit of the tree.
        samples: Matches considered per datastore, spread evenly over all matches.
        min_probability: Paths with a smaller share of the matches are dropped.
        pick: "greedy" ranks paths by counts, "coupled" with the noise of rule `replay`. "sampled" means "greedy" here.

    Raises:
        ValueError: If there is no datastore, if one cannot be read, or if an option is out of range.

    Source:
        He et al. 2023 (REST), section 3.
    """

    name = "rest"
    needs = Needs(topology="tree", host_tokens=True)

    def __init__(
        self,
        num_draft_tokens: int = 64,
        datastore: str | Path | Datastore | Sequence[str | Path | Datastore] = (),
        max_match: int = 16,
        min_match: int = 2,
        depth: int = 10,
        samples: int = 5000,
        min_probability: float = 0.02,
        pick: str = "greedy",
    ) -> None:
        if num_draft_tokens < 1 or depth < 1 or samples < 1:
            raise ValueError(
                f"rest num_draft_tokens, depth, samples: got {num_draft_tokens}, {depth}, {samples}; "
                "expected at least 1"
            )
        if not 1 <= min_match <= max_match:
            raise ValueError(
                f"rest min_match, max_match: got {min_match}, {max_match}; expected 1 <= min_match <= max_match"
            )
        if not 0 <= min_probability <= 1:
            raise ValueError(f"rest min_probability: got {min_probability}; expected 0 to 1")
        check_pick("rest", pick)
        self.num_draft_tokens, self.pick = num_draft_tokens, pick
        self._max_match, self._min_match = max_match, min_match
        self._depth, self._samples, self._min_probability = depth, samples, float(min_probability)
        self.datastores = _open_datastores(datastore)
        self._arrays = [each.array for each in self.datastores]
        self._look_up = structures().look_up

    @staticmethod
    def by_rule(prefers: str) -> dict[str, Any]:
        """Returns the defaults of options that follow from the rule."""
        return {"pick": prefers}

    @classmethod
    def from_parts(cls, parts: DrafterParts, datastore: Any = (), **options: Any) -> RestDrafter:
        """Builds a drafter that picks as the rule prefers, and checks that datastores fit the target's tokenizer."""
        opened = _open_datastores(datastore, fingerprint(parts.tokenizer), parts.target.vocab_size)
        return cls(**{**cls.by_rule(parts.prefers), "datastore": opened, **options})

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        """Does nothing: datastores are fixed."""

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        """Grows trees from continuations of the newest tokens in the datastores."""
        trees = []
        for row, limit, noise in zip(rows, budget.nodes, rng.replay_noise_keys(view.sampling(rows), self.pick)):
            context = list(view.tokens(row)[-self._max_match :])
            tokens, parents = self._tree(context, limit, noise) if limit > 0 else ([], [])
            trees.append(([context[-1], *tokens], [-1, *parents]))
        return Draft.trees(rows, trees, device=view.device)

    def _tree(self, context: list[int], limit: int, noise: tuple[int, int] | None) -> tuple[list[int], list[int]]:
        """Looks the context up: tokens and parents below the root."""
        try:
            tokens, parents, _, _ = self._look_up(
                self._arrays,
                context,
                self._max_match,
                self._depth,
                self._samples,
                limit,
                self._min_match,
                self._min_probability,
                noise,
            )
        except IndexError:
            raise ValueError(
                f"rest: a datastore of {[str(each.path) for each in self.datastores]} is damaged: its suffix array "
                "points outside of it; find it with `specdec datastore info --verify` and make it again"
            ) from None
        return tokens, parents

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Does nothing: datastores are fixed."""

    def release(self, rows: Sequence[int]) -> None:
        """Does nothing: rows have no data."""


def _open_datastores(datastore: Any, vocabulary: str = "", vocab_size: int | None = None) -> list[Datastore]:
    """Opens datastores and checks them against a tokenizer. Raises ValueError."""
    given = [datastore] if isinstance(datastore, (str, Path, Datastore)) else list(datastore)
    if not given:
        raise ValueError(
            "rest: got no datastore; expected datastore=PATH, or several; make one with `specdec datastore build`"
        )
    try:
        return [each if isinstance(each, Datastore) else Datastore(each, vocabulary, vocab_size) for each in given]
    except OSError as error:
        raise ValueError(
            f"rest datastore: got {str(error.filename)!r}: {error.strerror}; expected a file that may be read; make "
            "one with `specdec datastore build`"
        ) from error


DRAFTER = RestDrafter
