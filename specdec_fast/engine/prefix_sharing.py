"""Prefix sharing: requests whose texts begin alike share pages of the cache, so that the beginning is prefilled once.

It decides which pages a request takes over and when pages get names; the cache counts their owners. Shared are full
pages of committed tokens. A row writes only behind its committed tokens, so it never writes to a page with a name.
Tests: tests/engine/test_prefix_sharing.py, tests/engine/test_prefix_failures.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec_fast.engine.request import Handle
from specdec_fast.interfaces import Needs, StateView, Target, TargetOutput


@dataclass(slots=True)
class _Joining:
    """A row that is not prefilled yet.

    Attributes:
        states: Hidden states by name that belong to each adopted page, or None.
        pending: Names of the pages that the row will store. None: they get no names.
        names: Names of all full pages of its prompt.
    """

    states: list[Any]
    pending: set[bytes] | None
    names: list[bytes]


class PrefixSharing:
    """The pages that the requests of an engine share.

    Pages of a prompt get their names after its prefill, those of generated tokens when the request leaves its row.
    Drafters that read the hidden states of all prompt tokens get those of shared tokens from where the names are kept.
    Generated tokens have none there, so such engines share pages of prompts alone.

    Args:
        target: The target with its cache.
        needs: Requirements of the drafter.
        enabled: Whether the engine shares prefixes.

    Attributes:
        aux_hidden_states: Names of the hidden states that a prefill returns.
        why_not: Why prefixes are not shared, or None.
    """

    def __init__(self, target: Target, needs: Needs, enabled: bool) -> None:
        cache: Any = target.cache
        self._target, self._cache = target, cache
        self.aux_hidden_states = tuple(dict.fromkeys((*needs.aux_hidden_states, *needs.prompt_aux_hidden_states)))
        skips = needs.cross_request and not needs.all_prompt_states and not needs.aux_hidden_states
        self._keeps_states = bool(self.aux_hidden_states) and not skips
        self.why_not: str | None = None if enabled else "it was switched off"
        if enabled and not hasattr(cache, "adopt"):
            self.why_not = f"the cache ({type(cache).__name__}) cannot share pages"
        self._is_weight_check_due = True
        self._stored: set[int] = set()  # rows whose committed tokens are all stored
        self._joining: dict[int, _Joining] = {}  # rows that are not prefilled yet

    def explain(self) -> str:
        """Returns in words whether prefixes are shared."""
        if self.why_not is not None:
            return f"off: {self.why_not}"
        if hasattr(self._cache, "snapshot_points"):
            return "on: prompts alone, up to a place where the states of recurrent layers were saved"
        reason = "prompts alone, since the drafter reads their hidden states"
        return f"on: {reason if self._keeps_states else 'prompts and generated texts'}"

    def names_for(self, salt: str | None, longest: int) -> Any:
        """Returns the page names of a new request, or None if prefixes are not shared.

        Args:
            salt: Requests with different salts share nothing.
            longest: Tokens that its text may have. Some targets compute other keys for long texts.

        Raises:
            ValueError: If `salt` is no string.
        """
        if salt is not None and not isinstance(salt, str):
            raise ValueError(f"cache_salt: got {salt!r:.60}; expected a string, or None to share with all requests")
        if self.why_not is not None:
            return None
        kind_of = getattr(self._target, "prefix_kind", None)
        kind = "" if kind_of is None else kind_of(longest)
        return self._cache.page_names(salt or "", kind) if kind else self._cache.page_names(salt or "")

    def salt_of(self, handle: Handle) -> str | None:
        """Returns the salt of a request, "" if it has none, or None if it shares no prefixes."""
        return None if handle.page_names is None else handle.page_names.salt

    def forget(self) -> None:
        """Drops all names. Rows that run now get none."""
        if self.why_not is None:
            self._stored.clear()
            for joining in self._joining.values():  # some of their keys were computed before
                joining.pending = None
            self._cache.pages.forget()
            getattr(self._cache, "drop_snapshots", lambda: None)()

    def begin_busy_time(self) -> None:
        """Notes that requests begin after none were running, so that weights may have changed in between."""
        self._is_weight_check_due = True

    # -- admission ----------------------------------------------------------------------------------------------------

    def find(self, handle: Handle, tokens: Sequence[int]) -> list[int]:
        """Returns the stored pages with which a text begins. The root is never among their tokens.

        Args:
            handle: The request.
            tokens: Its committed tokens.
        """
        if handle.page_names is None:
            return []
        names = handle.page_names.upto(tokens, len(tokens) - 1)
        if names and self._is_weight_check_due:
            self._is_weight_check_due = False
            has_changed = getattr(self._target, "has_changed_weights", None)
            if has_changed is not None and has_changed():
                self.forget()
        found: list[int] = self._cache.find_pages(names, with_states=self._keeps_states)
        return found

    def is_pending(self, handle: Handle, tokens: Sequence[int], pages: Sequence[int]) -> bool:
        """Returns whether a row that is not prefilled yet will store the next page of a text.

        Args:
            handle: The request.
            tokens: Its committed tokens.
            pages: The pages that `find` returned.
        """
        if handle.page_names is None or not self._joining:
            return False
        names = handle.page_names.upto(tokens, len(tokens) - 1)
        missing = names[len(pages) :]
        return any(not joining.pending.isdisjoint(missing) for joining in self._joining.values() if joining.pending)

    def join(self, handle: Handle, row: int, tokens: Sequence[int], pages: Sequence[int]) -> list[int]:
        """Makes a row start with shared pages.

        Args:
            handle: The request.
            row: Its row, which is empty.
            tokens: Its committed tokens.
            pages: The pages that `find` returned.

        Returns:
            Lengths at which the prefill of the row must stop to save its states.
        """
        self._stored.discard(row)
        if handle.page_names is None:
            return []
        names = handle.page_names.upto(tokens, len(tokens) - 1)
        self._cache.adopt(row, pages)
        keeps = self._keeps_states  # they are fetched here, since names may be dropped during the prefill
        states = [self._cache.pages.states(name) if keeps else None for name in names[: len(pages)]]
        choose, size = getattr(self._cache, "snapshot_points", None), self._cache.page_size
        points: list[int] = []
        if choose is not None:
            known = [names[: len(self._cache.pages.find(names))], *(each.names for each in self._joining.values())]
            common = max(_common(names, each) for each in known) * size
            points = choose(self.num_tokens(pages), len(tokens) - 1, common)
        pending = names[len(pages) :] if choose is None else [names[point // size - 1] for point in points]
        self._joining[row] = _Joining(states, set(pending), names)
        if not handle.stats.steps:
            handle.stats.cached_tokens = min(self.num_tokens(pages), len(handle.prompt))
        return points

    def num_tokens(self, pages: Sequence[int]) -> int:
        """Returns the number of tokens in shared pages."""
        return len(pages) * self._cache.page_size if pages else 0

    def finish_prefill(
        self, view: StateView, handles: dict[int, Handle], rows: Sequence[int], output: TargetOutput | None
    ) -> TargetOutput | None:
        """Names the pages of prompts that have been stored.

        Args:
            view: Committed data.
            handles: Requests by row.
            rows: Rows whose prefill is complete, in order.
            output: Hidden states of the tokens of their prefill, row after row, or None.

        Returns:
            The output for the drafter, with the hidden states of shared tokens if the drafter needs them.
        """
        if self.why_not is not None:
            return output
        joining = [self._joining[row] for row in rows]
        shared = [len(each.states) * self._cache.page_size for each in joining]
        states: list[dict[str, torch.Tensor]] = []
        if self._keeps_states:
            output, states = self._join_states(view, rows, [each.states for each in joining], shared, output)
        elif output is not None and any(shared):
            output = TargetOutput(None, output.aux_hidden_states, tuple(shared))
        for at, (row, each) in enumerate(zip(rows, joining)):
            if each.pending is not None:
                names = handles[row].page_names.upto(view.tokens(row), view.length(row) - 1)
                known = len(each.states)
                self._cache.name_pages(row, names, self._split(states[at], known, len(names)) if states else ())
                self._stored.add(row)
            del self._joining[row]
        return output

    def _join_states(
        self,
        view: StateView,
        rows: Sequence[int],
        kept: Sequence[Sequence[Any]],
        shared: Sequence[int],
        output: TargetOutput | None,
    ) -> tuple[TargetOutput | None, list[dict[str, torch.Tensor]]]:
        """Adds the hidden states of shared tokens to the output of a prefill.

        Returns:
            The hidden states of all committed tokens but the roots, packed and by row. None and an empty list if there
            are no such tokens.
        """
        found = output.aux_hidden_states if output is not None else next((each[0] for each in kept if each), None)
        if found is None:
            return None, []
        new = [view.length(row) - 1 - count for row, count in zip(rows, shared)]
        parts = {name: tensor[: sum(new)].split(new) for name, tensor in found.items()}
        joined = [
            {name: torch.cat([*(each[name] for each in kept[at]), parts[name][at]]) for name in found}
            if kept[at]
            else {name: parts[name][at] for name in found}
            for at in range(len(rows))
        ]
        if any(shared):
            output = TargetOutput(None, {name: torch.cat([each[name] for each in joined]) for name in found})
        return output, joined

    def _split(self, states: dict[str, torch.Tensor], known: int, count: int) -> list[dict[str, torch.Tensor] | None]:
        """Hidden states of pages `known` to `count` - 1, as copies: views would keep those of the whole prefill."""
        size = self._cache.page_size
        spans = [slice(at * size, (at + 1) * size) for at in range(known, count)]
        return [None] * known + [{name: tensor[span].clone() for name, tensor in states.items()} for span in spans]

    # -- the end ------------------------------------------------------------------------------------------------------

    def leave(self, handle: Handle, row: int, tokens: Sequence[int]) -> None:
        """Names the pages of a row that is about to be released.

        Args:
            handle: The request.
            row: Its row.
            tokens: Its committed tokens, of which all but the root are stored.
        """
        self._joining.pop(row, None)
        if row not in self._stored:
            return
        self._stored.discard(row)
        if not self._keeps_states and handle.finish_reason != "error":
            self._cache.name_pages(row, handle.page_names.upto(tokens, len(tokens) - 1))
        if handle.finished:
            handle.page_names = None


def _common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Returns how many names two texts have in common. A name says which pages precede it."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[middle - 1] == other[middle - 1] else (low, middle - 1)
    return low
