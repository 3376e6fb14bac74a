"""Next-token distributions: logits with four numbers per row.

Knows nothing of drafts, models or rules. Tests: tests/core/test_draft.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_fast.core.sampling_rows import PerRow, sampling_rows
from specdec_kernels import Overlay, distribution_stats
from specdec_kernels.dispatch import argument_checks

_MOST_ROUNDING = 0.01  # bfloat16 sums of large vocabularies are off by less


@dataclass(slots=True, eq=False)
class TokenDistributions:
    """R next-token distributions, stored as logits and four numbers per row.

    The probability of token v in a row is ``exp(l * inv_t - lse)`` if ``l > cut or (l == cut and v <= tie_id)``, else
    0. Filters are exact, and no row is sorted or copied. A row at temperature 0 has ``inv_t == 0`` and its arg-max in
    ``tie_id``. Distributions are computed once, where tokens are sampled; rules never recompute them.

    Attributes:
        logits: Any float dtype, [R, V], after the logits processors unless there is an overlay. Code that reads logits
            itself calls `effective_logits`.
        inv_t: Inverse temperature, float [R]; 0 at temperature 0.
        lse: Logarithm of the sum of the weights that are kept, float [R].
        cut: Smallest logit that is kept, float [R].
        tie_id: Largest token id that is kept among logits equal to the cut, int32 [R].
        token_ids: Target vocabulary id of each column, int64 [V], for draft models with a vocabulary of their own. None
            if the vocabularies are the same.
        mass: Total probability of each block of 1,024 tokens, or an upper bound of it, float [R, ceil(V / 1024)].
            Samplers use it to skip blocks; it never changes a sample. None if it was not computed.
        overlay: Logits processors that operators apply when they load the logits of a target on a device, or None.
    """

    logits: Tensor
    inv_t: Tensor
    lse: Tensor
    cut: Tensor
    tie_id: Tensor
    token_ids: Tensor | None = None
    mass: Tensor | None = None
    overlay: Overlay | None = None

    @staticmethod
    def of(
        logits: Tensor,
        *,
        temperature: PerRow = 1.0,
        top_k: PerRow = 0,
        top_p: PerRow = 1.0,
        min_p: PerRow = 0.0,
        token_ids: Tensor | None = None,
    ) -> TokenDistributions:
        """Computes the distributions of logits. Each parameter is one number for all rows, or one for each row.

        The parameters mean what they mean in `SamplingParams`, and have the same defaults.

        Args:
            logits: Any float dtype, [R, V], after the caller's own processors. It is kept, not copied.
            temperature: 0 is greedy.
            top_k: 0 and -1 are off.
            top_p: 1 is off.
            min_p: 0 is off.
            token_ids: Target vocabulary id of each column, int64 [V], for draft models with a vocabulary of their own.

        Returns:
            R distributions.

        Raises:
            ValueError: If a shape or value is wrong. Values on a GPU are not read.
        """
        argument_checks.check_logits("TokenDistributions.of", "logits", logits, "R")
        rows = sampling_rows(logits.shape[0], logits.device, temperature, top_k, top_p, min_p)
        inv_t, lse, cut, tie_id, mass = distribution_stats(logits, *rows, masses=True)
        return TokenDistributions(logits, inv_t, lse, cut, tie_id, token_ids, mass)

    @staticmethod
    def from_probs(probs: Tensor, *, token_ids: Tensor | None = None, check: bool | None = None) -> TokenDistributions:
        """Returns distributions with given probabilities: of a draft model that another program sampled from.

        Rows are normalised, so that rounding of their sums does no harm. Zeros stay exactly zero.

        Args:
            probs: Any float dtype, [R, V]: what the tokens were sampled from, after temperature and filters.
            token_ids: Target vocabulary id of each column, int64 [V], for draft models with a vocabulary of their own.
            check: Whether to check the values. None checks them on a CPU only, since a GPU would have to wait.

        Returns:
            R distributions.

        Raises:
            ValueError: If a row has a negative number or NaN, or does not add up to 1 within 1 %.
        """
        argument_checks.check_logits("TokenDistributions.from_probs", "probs", probs, "R")
        wide = probs if probs.dtype == torch.float64 else probs.float()
        total = wide.sum(1)
        if probs.is_cpu if check is None else check:
            check_probs(wide, total)
        cut, last = torch.full_like(total, -torch.inf), wide.shape[1] - 1
        tie_id = torch.full_like(total, last, dtype=torch.int32)
        return TokenDistributions(wide.log(), torch.ones_like(total), total.log(), cut, tie_id, token_ids)

    @property
    def stats(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`inv_t`, `lse`, `cut` and `tie_id`, each [R], in the order of the operators' arguments."""
        return self.inv_t, self.lse, self.cut, self.tie_id

    def effective_logits(self) -> Tensor:
        """Returns the logits after the logits processors, [R, V]: a float32 copy if there is an overlay."""
        return self.logits if self.overlay is None else self.overlay.apply(self.logits)

    def select(self, index: Tensor) -> TokenDistributions:
        """Returns the distributions of some rows.

        Args:
            index: Rows in the order of the result, int64 [R'].
        """
        return TokenDistributions(
            self.logits[index],
            self.inv_t[index],
            self.lse[index],
            self.cut[index],
            self.tie_id[index],
            self.token_ids,
            None if self.mass is None else self.mass[index],
            None if self.overlay is None else self.overlay.select_rows(index),
        )

    def check(self, vocab_size: int | None = None, *, wait: bool = True) -> None:
        """Checks shapes, dtypes, and that columns fit the target's vocabulary.

        Args:
            vocab_size: V of the target, or None if it is unknown.
            wait: Check the values of `token_ids` on a GPU too, which waits for the device.

        Raises:
            ValueError: If something does not fit.
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
                f"distributions: got {width} columns; expected at most the target's {vocab_size}; slice off padding or "
                "pass token_ids"
            )

    def probs(self) -> Tensor:
        """Returns the probabilities, float32 or float64 [R, V]. For tests and plots; the engine never computes them."""
        dtype = torch.float64 if self.logits.dtype == torch.float64 else torch.float32
        logits = self.effective_logits().to(dtype)
        ids = torch.arange(logits.shape[1], device=logits.device)
        cut, tie = self.cut[:, None].to(dtype), self.tie_id[:, None]
        kept = ((logits > cut) | ((logits == cut) & (ids <= tie))) & (logits > float("-inf"))
        scaled = torch.where(kept, logits, 0.0) * self.inv_t[:, None].to(dtype) - self.lse[:, None].to(dtype)
        return torch.where(kept, scaled.exp(), 0.0)


def check_probs(
    probs: Tensor, total: Tensor, used: Tensor | None = None, name: str = "probs", row_shape: tuple[int, ...] = ()
) -> None:
    """Checks that rows are probabilities. On a GPU it waits.

    Args:
        probs: [R, V].
        total: Sum of each row, [R].
        used: Rows that are checked, bool [R]; None for all.
        name: The caller's argument.
        row_shape: Its shape without the last dimension, for the place of a row; (R,) by default.

    Raises:
        ValueError: If a row has a negative number or NaN, or does not add up to 1 within 1 %.
    """
    if not len(probs):
        return
    bad = ~((probs.amin(1) >= 0) & ((total - 1).abs() <= _MOST_ROUNDING))
    bad = bad if used is None else bad & used
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        place = bad.view(row_shape or (-1,)).nonzero()[0].tolist()
        raise ValueError(
            f"{name}{place}: got numbers from {float(probs[row].min()):.4g} that add up to {float(total[row]):.4g}; "
            "expected probabilities that add up to 1; pass logits.softmax(-1), or normalise the row"
        )


class PendingDistributions(TokenDistributions):
    """Distributions whose statistics are computed when they are first read.

    A rule may compute them itself on the way, for the rows that it needs, and set them by `set_stats`.

    Attributes:
        logits: Any float dtype, [R, V]. There is no overlay.
        sampling_args: Temperature, top-k, top-p and min-p, each [R], in the order of `distribution_stats`.
    """

    __slots__ = ("_stats", "sampling_args")
    sampling_args: tuple[Tensor, Tensor, Tensor, Tensor]
    _stats: tuple[Tensor, ...] | None

    def __init__(self, logits: Tensor, sampling_args: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        self.logits, self.token_ids, self.overlay = logits, None, None
        self.sampling_args, self._stats = sampling_args, None

    def set_stats(self, stats: Sequence[Tensor]) -> None:
        """Sets the statistics that a rule computed.

        Args:
            stats: `inv_t`, `lse`, `cut`, `tie_id` and `mass`. Rows that the rule skipped have `lse` = +inf; `select`
                computes them if they are needed.
        """
        self._stats = tuple(stats)

    def select(self, index: Tensor) -> TokenDistributions:
        """Returns the distributions of some rows, and computes them if the rule skipped one of them.

        Args:
            index: Rows in the order of the result, int64 [R'].
        """
        selected = TokenDistributions.select(self, index)
        if not torch.isposinf(selected.lse).any():
            return selected
        inv_t, lse, cut, tie_id, mass = distribution_stats(
            selected.logits, *(part[index] for part in self.sampling_args), masses=True
        )
        return TokenDistributions(selected.logits, inv_t, lse, cut, tie_id, mass=mass)

    def _get_stats(self) -> tuple[Tensor, ...]:
        """The statistics, which are computed now if they are not known."""
        stats = self._stats
        if stats is None:
            stats = distribution_stats(self.logits, *self.sampling_args, masses=True)
            self.set_stats(stats)
        return stats

    inv_t = property(lambda self: self._get_stats()[0])
    lse = property(lambda self: self._get_stats()[1])
    cut = property(lambda self: self._get_stats()[2])
    tie_id = property(lambda self: self._get_stats()[3])
    mass = property(lambda self: self._get_stats()[4])


def concat_distributions(parts: Sequence[TokenDistributions]) -> TokenDistributions:
    """Joins distributions over the same vocabulary.

    Args:
        parts: At least one; their rows follow each other in the result.

    Returns:
        All rows, without an overlay.
    """
    if len(parts) == 1:
        return parts[0]

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    mass = None if any(part.mass is None for part in parts) else joined("mass")
    stats = (joined("inv_t"), joined("lse"), joined("cut"), joined("tie_id"))
    return TokenDistributions(torch.cat([part.effective_logits() for part in parts]), *stats, parts[0].token_ids, mass)
