"""Interface of drafters, and what they see of the engine. Tests: tests/test_interfaces.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from specdec_fast.core.draft import Draft
from specdec_fast.interfaces.step_values import Acceptance, Budget, Needs, Rng, TargetOutput
from specdec_fast.interfaces.target import Target
from specdec_fast.sampling.sampling_tensors import SamplingTensors


class StateView(Protocol):
    """A read-only view of committed data. Drafters see nothing newer."""

    @property
    def device(self) -> torch.device:
        """The device of the target, where drafts must be."""
        ...

    def tokens(self, row: int) -> Sequence[int]:
        """Returns the committed tokens of a row: prompt, then generated tokens. The last one is the root."""
        ...

    def length(self, row: int) -> int:
        """Returns the number of committed tokens of a row."""
        ...

    def prompt_length(self, row: int) -> int:
        """Returns the number of prompt tokens of a row."""
        ...

    def longest(self, row: int) -> int:
        """Returns the number of tokens at which the text of a row ends at the latest."""
        ...

    def cache_salt(self, row: int) -> str | None:
        """Returns a name of the rows with which a row may share stored prefixes. None: it shares with no row."""
        ...

    def sampling(self, rows: Sequence[int]) -> SamplingTensors:
        """Returns the sampling parameters of rows, packed as tensors [B] in the order of `rows`."""
        ...


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """What `from_parts` may build a drafter from.

    Attributes:
        target: The target that the drafter serves.
        tokenizer: The target's tokenizer, or None.
        draft: Opens the draft model of the caller. None if the caller passed none.
        prefers: How the rule wants draft tokens picked (`Rule.prefers`).
        make: Builds another drafter from the same parts: `make(name, **options)`.
    """

    target: Target
    tokenizer: Any
    draft: Callable[[], Target] | None
    prefers: str
    make: Callable[..., Drafter]


@runtime_checkable
class Drafter(Protocol):
    """Proposes draft tokens. Four methods; rows join by `begin` and leave by `release` between any two steps.

    A drafter that raises never ends a request: its requests continue without drafts.

    Sampled drafts (`Needs.dists`) are lossless under rules that read draft distributions (`Rule.uses_q`) if:

    - `propose` uses only committed data, the budget, and tokens that it sampled before in this step;
    - every sampled token stays in the draft, with its distribution, and is no score-only node.

    Pruning after sampling is therefore limited to deterministic tokens, and to rules that ignore q.

    A class may define more, and `specdec_fast.drafters.make_drafter` uses it:

    - `from_parts(parts, **options)`, a class method that builds a drafter from `DrafterParts`; without it, the class is
      called with the options;
    - `by_rule(prefers)`, a static method that returns the defaults of options that follow from the rule;
    - `takes_draft = True` if it requires a draft model, `may_take_draft = True` if some options use one;
    - `draws = True` if some options make it sample from distributions;
    - `apart`, the options with which it does not need `Needs.excludes_siblings`.

    Attributes:
        name: Key of the drafter: the name of its module.
        needs: Requirements. The class attribute holds for the default options.
    """

    name: str
    needs: Needs

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        """Adds rows, after their prefill.

        Args:
            view: Committed data.
            rows: Rows that join.
            prompt_output: Hidden states of all committed tokens but the roots, [M, hidden] by name, row after row. None
                if the drafter needs none. With `Needs.all_prompt_states=False`, `num_shared` first tokens of each row
                may have none.
        """
        ...

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft | None:
        """Proposes a tree for each row. Node 0 is the root, the newest committed token.

        Args:
            view: Committed data.
            rows: Rows of the step, in order.
            budget: Most draft nodes of each row, root not counted.
            rng: Keys of the random numbers, in the order of `rows`.

        Returns:
            A draft for exactly these rows, on `view.device`. A row without proposals has its root alone. None if no row
            has any: `observe` then gets the draft of roots that the engine makes, which costs less.
        """
        ...

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Observes the result of a step, after its tokens were committed.

        Args:
            view: Committed data, with the tokens of this step.
            draft: The draft that was verified.
            acceptance: What the rule accepted.
            output: Logits [M, V] and hidden states [M, hidden] of all nodes.
        """
        ...

    def release(self, rows: Sequence[int]) -> None:
        """Removes rows and frees their data. Unknown rows are ignored."""
        ...
