"""Layout of a graph without cycles in levels (Sugiyama et al. 1981): few crossings, short arrows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from docs.figures.draw.imports import Graph

GAP, THIN = 16.0, 8.0  # points between items; the width of an arrow that passes a level
SWEEPS = 40


class Layout:
    """Places of boxes and arrows.

    Args:
        edges: The arrows: from each box to boxes of lower levels.
        levels: The level of each box.
        widths: The width of each box.
        page: Left and right edge.

    Attributes:
        rows: Items of each level from left to right; an arrow that passes a level is an item of it.
        x: The middle of each item.
    """

    def __init__(
        self, edges: Graph, levels: Mapping[str, int], widths: Mapping[str, float], page: tuple[float, float]
    ) -> None:
        self.page, self.widths = page, dict(widths)
        self.paths: dict[tuple[str, str], list[str]] = {}
        self.rows: list[list[str]] = [[] for _ in range(max(levels.values()) + 1)]
        self._links: dict[str, dict[int, list[str]]] = {}
        for box in sorted(levels):
            self.rows[levels[box]].append(box)
        for start in sorted(edges):
            for end in sorted(edges[start]):
                between = range(levels[start] - 1, levels[end], -1)
                passed = [f"{start}>{end}@{level}" for level in between]
                for name, level in zip(passed, between):
                    self.rows[level].append(name)
                    self.widths[name] = THIN
                self.paths[start, end] = [start, *passed, end]
        for path in self.paths.values():
            for upper, lower in pairwise(path):
                self._links.setdefault(upper, {}).setdefault(-1, []).append(lower)
                self._links.setdefault(lower, {}).setdefault(1, []).append(upper)
        self._order()
        self.x = self._spread()

    def _order(self) -> None:
        """Sorts each level by the middle of its neighbours, and keeps the order with the fewest crossings."""
        best, least = [list(row) for row in self.rows], self.crossings()
        for sweep in range(SWEEPS):
            side = 1 if sweep % 2 else -1
            for row in self.rows if side == -1 else reversed(self.rows):
                place = {name: at / max(len(other) - 1, 1) for other in self.rows for at, name in enumerate(other)}
                own = {name: self._mean(name, place, (side,) if sweep % 4 < 2 else (1, -1)) for name in row}
                row.sort(key=lambda name: (own[name], place[name]))
            if self.crossings() < least:
                best, least = [list(row) for row in self.rows], self.crossings()
        self.rows = best
        self._swap()

    def _swap(self) -> None:
        """Swaps neighbours for as long as that removes crossings."""
        found = True
        while found:
            found = False
            for row in self.rows:
                for at in range(len(row) - 1):
                    before = self.crossings()
                    row[at], row[at + 1] = row[at + 1], row[at]
                    if self.crossings() < before:
                        found = True
                    else:
                        row[at], row[at + 1] = row[at + 1], row[at]

    def crossings(self) -> int:
        """How often two arrows cross between two levels."""
        place = {name: at for row in self.rows for at, name in enumerate(row)}
        total = 0
        for row in self.rows:
            lines = [(place[name], place[low]) for name in row for low in self._links.get(name, {}).get(-1, ())]
            total += sum((a - c) * (b - d) < 0 for at, (a, b) in enumerate(lines) for c, d in lines[:at])
        return total

    def _mean(self, name: str, place: Mapping[str, float], sides: Sequence[int]) -> float:
        near = [place[other] for side in sides for other in self._links.get(name, {}).get(side, ())]
        return sum(near) / len(near) if near else place[name]

    def _spread(self) -> dict[str, float]:
        """Moves items towards their neighbours, as far as their level has room."""
        left, right = self.page
        x: dict[str, float] = {}
        for row in self.rows:
            step = (right - left) / len(row)
            x.update({name: left + (at + 0.5) * step for at, name in enumerate(row)})
        for sweep in range(SWEEPS):
            for row in self.rows if sweep % 2 else reversed(self.rows):
                wanted = [self._mean(name, x, (1, -1)) for name in row]
                forth = self._apart(row, wanted)
                mirrored = self._apart(row[::-1], [left + right - each for each in wanted[::-1]])
                back = [left + right - each for each in mirrored[::-1]]
                x.update({name: (a + b) / 2 for name, a, b in zip(row, forth, back)})
        low = min(x[name] - self.widths[name] / 2 for name in x)
        high = max(x[name] + self.widths[name] / 2 for name in x)
        shift = (left + right - low - high) / 2  # to the middle of the page
        return {name: place + shift for name, place in x.items()}

    def _apart(self, row: Sequence[str], wanted: Sequence[float]) -> list[float]:
        """The wanted places, each at least a gap to the right of the one before, none beyond the page."""
        left, right = self.page
        half = [self.widths[name] / 2 for name in row]
        places: list[float] = []
        for at, place in enumerate(wanted):
            least = left + half[at] if at == 0 else places[-1] + half[at - 1] + GAP + half[at]
            places.append(max(place, least))
        limit = right
        for at in range(len(places) - 1, -1, -1):
            places[at] = min(places[at], limit - half[at])
            limit = places[at] - half[at] - GAP
        return places
