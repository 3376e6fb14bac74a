"""Interfaces of the target model and of its key/value cache. Tests: tests/test_interfaces.py."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from specdec_fast.core.draft import Draft
from specdec_fast.interfaces.step_values import Slots, TargetOutput
from specdec_kernels import TreePlan


@runtime_checkable
class KVCache(Protocol):
    """A transactional key/value cache.

    A step stages its nodes, then commits one path per request; all other nodes are forgotten. Lengths are absolute.
    `specdec_fast.cache.PagedCache` implements it. Engines share prefixes over caches that have its methods too:
    `page_names`, `find_pages`, `has_pages_for`, `adopt` and `name_pages`.

    Attributes:
        lengths: Committed tokens of each row, int32 [max_rows].
    """

    lengths: Tensor

    def stage(
        self, rows: Tensor, offsets: Tensor, num_nodes: int, plan: TreePlan | None = None, *, advance: bool = False
    ) -> Slots:
        """Assigns slots to packed nodes: node i of a row goes to slot `lengths[row] + i`.

        The caller has reserved the pages.

        Args:
            rows: Row of each request, int32 [B].
            offsets: First node of each request, int32 [B + 1]. Nodes behind `offsets[B]` go to the trash page.
            num_nodes: M, the number of packed nodes.
            plan: Depths and ancestors of trees. None for causal chains.
            advance: Commit the nodes at once. Prefill and draft models use it for known tokens.

        Returns:
            The places of the M nodes.
        """
        ...

    def commit(
        self,
        rows: Tensor,
        slots: Slots,
        path: Tensor,
        num_accepted: Tensor,
        chains: Sequence[int] | None = None,
    ) -> None:
        """Keeps the accepted path of each request and forgets its other nodes.

        Each length grows by the root and the accepted nodes.

        Args:
            rows: Row of each request, int32 [B].
            slots: The places that `stage` returned.
            path: Accepted nodes on the packed axis, root first and padded with -1, int32 [B, D + 1].
            num_accepted: Accepted nodes, root not counted, int32 [B].
            chains: The rows as host integers if all drafts are chains, else None. Accepted nodes of a chain are already
                in place, so a cache on a CPU only changes lengths.
        """
        ...

    def rollback(self, rows: Tensor | Sequence[int], lengths: Tensor | Sequence[int]) -> None:
        """Truncates rows to absolute lengths.

        Args:
            rows: int32 [B], or host integers.
            lengths: New length of each row, int32 [B], or host integers.

        Raises:
            ValueError: If a host integer is negative or longer than the row.
        """
        ...

    def claim(self, owner: object, rows: Collection[int] = ()) -> None:
        """Makes `owner` the only user of the cache and frees the pages of all rows but `rows`.

        Args:
            owner: The engine that uses the cache from now on.
            rows: Rows that the owner occupies.

        Raises:
            ValueError: If another live owner holds pages.
        """
        ...

    def reserve(self, row: int, length: int) -> bool:
        """Reserves pages for the first `length` tokens of a row.

        Returns:
            False, without any change, if the pool has too few free pages.
        """
        ...

    def release(self, rows: Sequence[int]) -> None:
        """Frees all pages of rows. Calling it twice is harmless."""
        ...


@runtime_checkable
class Target(Protocol):
    """A model that scores packed token trees over a cache of its own.

    `specdec_fast.targets.HuggingFaceTarget` implements it for transformers models. A target may have a method
    `has_changed_weights()`: whether weights have changed since the last call. Engines then forget stored prefixes. If
    keys depend on how long a text may become, `begin_row(row, longest)` says it for a new request in a row, and
    `prefix_kind(longest)` names texts whose equal beginnings have equal keys.

    Attributes:
        vocab_size: V, the number of token ids.
    """

    vocab_size: int

    @property
    def cache(self) -> KVCache:
        """The cache that the passes of this target read and write."""
        ...

    def extend(
        self,
        rows: Tensor,
        tokens: Tensor,
        offsets: Tensor,
        *,
        logits: bool | Tensor,
        aux_hidden_states: Sequence[str] = (),
    ) -> TargetOutput:
        """Commits known tokens and stores their keys and values, as in prefill.

        Args:
            rows: Row of each request, int32 [B].
            tokens: Packed tokens, int64 [M].
            offsets: First token of each request, int32 [B + 1].
            logits: True for the logits after the last token of each request, False for none. A tensor has the packed
                indices of the tokens whose logits the caller needs, int64 [N].
            aux_hidden_states: Names of hidden states to return, as in `Needs.aux_hidden_states`.

        Returns:
            Logits [B, V], [N, V] or None, and hidden states [M, hidden] by name.
        """
        ...

    def score(self, draft: Draft, plan: TreePlan, aux_hidden_states: Sequence[str] = ()) -> tuple[TargetOutput, Slots]:
        """Stages the nodes of a draft and computes the logits after every node in one pass.

        Args:
            draft: Packed trees of M nodes.
            plan: Depths, ancestors and links of the nodes.
            aux_hidden_states: Names of hidden states to return.

        Returns:
            Logits [M, V] with hidden states [M, hidden] by name, and the slots that `KVCache.commit` takes.
        """
        ...
