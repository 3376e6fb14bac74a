"""The processes that compute one model together: what they tell each other beside the model's own passes.

A model whose weights are sharded over processes has one engine in each. Passes of all engines wait for each other, so
the engines must take the same decisions. `Ranks` shares a number once, and compares a few numbers in every step. It
uses a group of its own, on the CPU, whose waits end soon. Tests: tests/engine/test_tensor_parallel.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

WAIT = 25.0
"""Seconds that a process waits for the others when they compare, and when they connect."""

_LOST_WORDS = re.compile(
    r"\b(gloo|nccl\w*|connections?|sockets?|process ?groups?(gloo|nccl)?|(tcp|file|hash|prefix)store|timed out"
    r"|timeouts?)\b"
)
"""What errors of collective operations speak of, in small letters. Those without a type of their own come from gloo."""


class RanksError(RuntimeError):
    """Processes that compute one model together are out of step. All of them raise it."""


class LostRankError(RanksError):
    """A process of the model has ended, or does not answer. Nothing can be computed any more."""


class Ranks:
    """The processes of one sharded model, seen from one of them.

    Every process makes the same calls in the same order.

    Args:
        group: The process group over which the weights are sharded.

    Attributes:
        size: Number of processes.
        rank: Place of this process among them.
    """

    def __init__(self, group: ProcessGroup) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        self._members = dist.get_process_group_ranks(group)
        self.size, self.rank = len(self._members), dist.get_rank(group)
        self._lost: LostRankError | None = None

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """Returns the numbers of all processes, by rank.

        Args:
            numbers: Numbers of this process in the range of int64, as many as each of the others has.

        Raises:
            LostRankError: If another process has ended, or does not gather within `WAIT` seconds.
        """
        with self.naming_lost_ranks():
            own = torch.tensor(numbers, dtype=torch.int64)
            found = [torch.empty_like(own) for _ in self._members]
            self._dist.all_gather(found, own, group=_comparing_group(self._members))
            return [each.tolist() for each in found]

    def compare(self, facts: Mapping[str, int]) -> None:
        """Compares facts of all processes.

        Args:
            facts: Numbers of this process by what they are about, in words after "differs in". All have the same keys.

        Raises:
            RanksError: In every process, if any fact differs in any of them.
        """
        table = self.gather(list(facts.values()))
        for at, fact in enumerate(facts):
            odd = [rank for rank, own in enumerate(table) if own[at] != table[0][at]]
            if odd:
                raise RanksError(
                    f"ranks: process {odd[0]} of {self.size} differs from process 0 in {fact}; expected the same "
                    "calls, arguments and results everywhere, since these processes compute one model; run the same "
                    "program with the same settings on equal machines, and let rank 0 broadcast what it reads"
                )

    @contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """Turns errors of collective operations inside of a block into `LostRankError`.

        Raises:
            LostRankError: If a collective operation failed here, or before: then nothing waits again.
            RuntimeError: Whatever else the block raises.
            RanksError: If the block raises it.
        """
        if self._lost is not None:
            raise self._lost
        try:
            yield
        except RanksError:
            raise
        except RuntimeError as error:
            words = next(iter(str(error).splitlines()), "")
            if not (isinstance(error, _types_of_lost_ranks()) or _LOST_WORDS.search(words.lower())):
                raise
            self._lost = LostRankError(
                f"ranks: process {self.rank} of {self.size} lost another one, or waited too long for it ({words}); "
                "expected all processes of the model to run; look for the first error among the others, and start all "
                "of them again"
            )
            raise self._lost from error


def _types_of_lost_ranks() -> tuple[type[Exception], ...]:
    """Returns the types that torch gives to errors of collective operations. Not every build of torch has them."""
    import torch.distributed as dist

    return tuple(each for name in ("DistError", "DistBackendError") if (each := getattr(dist, name, None)) is not None)


_COMPARING: dict[tuple[int, ...], Any] = {}
"""Members -> the group in which they compare. torch names such a group by its members, and cannot make it twice."""


def _comparing_group(members: Sequence[int]) -> Any:
    """Returns the group in which processes compare, on the CPU and with short waits. It ends with all other groups."""
    import torch.distributed as dist

    found = _COMPARING.get(key := tuple(members))
    try:
        if found is not None and dist.get_process_group_ranks(found):
            return found
    except (KeyError, ValueError, RuntimeError):  # the groups of then have ended, and others were made
        pass
    waits = timedelta(seconds=WAIT)
    _COMPARING[key] = dist.new_group(list(key), waits, backend="gloo", use_local_synchronization=True)
    return _COMPARING[key]
