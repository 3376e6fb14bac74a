"""Next-token distributions as logits with four numbers a row, made once by whoever samples from them.

Knows nothing of drafts, models or rules. Tests: tests/core/test_draft.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_kernels import Overlay, distribution_stats
from specdec_kernels.dispatch import argument_checks


@dataclass(slots=True, eq=False)
class TokenDistributions:
    """R next-token distributions, made once by whoever samples from them and never recomputed by a rule.

    The weight of token v in a row is ``exp(l*inv_t - lse)`` if ``l > cut or (l == cut and v <= tie_id)``, else 0.
    A row at temperature 0 has ``inv_t == 0`` and its arg-max in ``tie_id``.

    logits: [R, V] any float dtype, after penalties, bias and masks, unless an overlay lies over them; inv_t, lse, cut:
    float [R]; tie_id: int32 [R]; token_ids: int64 [V] draft vocabulary -> target vocabulary, or None when they are the
    same; mass: float [R, ceil(V / 1024)] block masses of these distributions (`distribution_stats(..., masses=True)`)
    or bounds of them, or None: they make draws cheaper and never change them; overlay: edits that operators fold in
    as they load the logits (of a target's distributions on a device), or None. Who reads the logits itself asks for
    `levels()`.
    """

    logits: Tensor
    inv_t: Tensor
    lse: Tensor
    cut: Tensor
    tie_id: Tensor
    token_ids: Tensor | None = None
    mass: Tensor | None = None
    overlay: Overlay | None = None

    @property
    def stats(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(inv_t, lse, cut, tie_id), in the order in which the ops take them."""
        return self.inv_t, self.lse, self.cut, self.tie_id

    def effective_logits(self) -> Tensor:
        """The logits as the distributions have them, [R, V]: a copy in float32 where an overlay lies over them."""
        return self.logits if self.overlay is None else self.overlay.over(self.logits)

    def select(self, index: Tensor) -> TokenDistributions:
        """The distributions of the given rows (int64 [R'])."""
        return TokenDistributions(
            self.logits[index],
            self.inv_t[index],
            self.lse[index],
            self.cut[index],
            self.tie_id[index],
            self.token_ids,
            None if self.mass is None else self.mass[index],
            None if self.overlay is None else self.overlay.select(index),
        )

    def check(self, vocab_size: int | None = None, *, wait: bool = True) -> None:
        """Raise ValueError unless shapes and dtypes fit together, and columns fit a target's vocabulary. wait: look at
        token_ids on a GPU too, which waits for them.
        """
        width, ids = (
            argument_checks.check_dist("dists", "the", (self.logits, *self.stats), "R")[0].shape[1],
            self.token_ids,
        )
        if ids is not None:
            argument_checks.check_tensor("dists", "token_ids", ids, torch.int64, width)
            if wait and vocab_size is not None:
                least, most = int(ids.min()), int(ids.max())
                if not 0 <= least <= most < vocab_size:
                    raise ValueError(f"distributions: got token_ids {least}..{most}; expected 0..{vocab_size - 1}")
        elif vocab_size is not None and width > vocab_size:
            raise ValueError(
                f"distributions: got {width} columns; expected at most the target's {vocab_size}; slice off padding "
                f"or pass "
                "token_ids"
            )

    def probs(self) -> Tensor:
        """The probabilities, [R, V]: for tests and plots; the engine never materialises them."""
        dtype = torch.float64 if self.logits.dtype == torch.float64 else torch.float32
        logits = self.effective_logits().to(dtype)
        ids = torch.arange(logits.shape[1], device=logits.device)
        cut, tie = self.cut[:, None].to(dtype), self.tie_id[:, None]
        kept = ((logits > cut) | ((logits == cut) & (ids <= tie))) & (logits > float("-inf"))
        scaled = torch.where(kept, logits, 0.0) * self.inv_t[:, None].to(dtype) - self.lse[:, None].to(dtype)
        return torch.where(kept, scaled.exp(), 0.0)


class PendingDistributions(TokenDistributions):
    """Distributions whose statistics nobody has read yet: the first look finds all of them, unless a rule brings its
    own.

    logits: [R, V], never with an overlay; sampling_args: (temperature, top_k, top_p, min_p), each [R], as distribution_stats
    takes them.
    """

    __slots__ = ("_found", "sampling_args")
    sampling_args: tuple[Tensor, Tensor, Tensor, Tensor]
    _found: tuple[Tensor, ...] | None

    def __init__(self, logits: Tensor, sampling_args: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        self.logits, self.token_ids, self.overlay, self.sampling_args, self._found = (
            logits,
            None,
            None,
            sampling_args,
            None,
        )

    def set_stats(self, found: Sequence[Tensor]) -> None:
        """The statistics (inv_t, lse, cut, tie_id, mass) as a rule found them. Rows that it passed by have lse = +inf,
        and no weights but in `select`.
        """
        self._found = tuple(found)

    def select(self, index: Tensor) -> TokenDistributions:
        """The distributions of the given rows, found now if the rule passed one of them by."""
        chosen = TokenDistributions.select(self, index)
        if not torch.isposinf(chosen.lse).any():
            return chosen
        inv_t, lse, cut, tie_id, mass = distribution_stats(
            chosen.logits, *(part[index] for part in self.sampling_args), masses=True
        )
        return TokenDistributions(chosen.logits, inv_t, lse, cut, tie_id, mass=mass)

    def _all(self) -> tuple[Tensor, ...]:
        found = self._found
        if found is None:
            found = distribution_stats(self.logits, *self.sampling_args, masses=True)
            self.set_stats(found)
        return found

    inv_t = property(lambda self: self._all()[0])
    lse = property(lambda self: self._all()[1])
    cut = property(lambda self: self._all()[2])
    tie_id = property(lambda self: self._all()[3])
    mass = property(lambda self: self._all()[4])


def concat_distributions(parts: Sequence[TokenDistributions]) -> TokenDistributions:
    """One `TokenDistributions` with the rows of all parts, in order (all over the same vocabulary)."""
    if len(parts) == 1:
        return parts[0]

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    mass = None if any(part.mass is None for part in parts) else joined("mass")
    stats = (joined("inv_t"), joined("lse"), joined("cut"), joined("tie_id"))
    return TokenDistributions(torch.cat([part.effective_logits() for part in parts]), *stats, parts[0].token_ids, mass)
