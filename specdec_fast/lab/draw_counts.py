"""Counts of many draws at one place, kept on disk as they grow, and what the target's distribution says they should be.

Tests: tests/lab/test_draw_counts.py.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, is_zipfile

import numpy as np
import torch

from specdec_fast.interfaces import Rule
from specdec_fast.lab.count_distances import certified_distance
from specdec_fast.lab.simulator import Simulator, layout_for, on_device
from specdec_fast.lab.statistics import Test, chi_square, g_test, rate_test
from specdec_fast.lab.text_positions import Place

TEXT = 3
"""Tokens of every text: enough for two steps, whose coins must have nothing in common."""
GROUPS = 6
"""Cells per token of the joint test."""
CHUNK = 20_000
WHOLE = 4
"""Every so manieth text goes on to TEXT tokens; the others end with their first step."""
SEEDS = 2**22
"""As many seeds have 2^40 texts of their own below FIRST_SEED."""
VECTORS = ("first", "accepted", "recovered", "bonus", "after_rejection")


@dataclass(slots=True)
class Counts:
    """What was counted at one place.

    first, accepted, recovered: int64 [V], the first token of a text, and by how it came about; bonus: tokens drawn
    after everything was accepted; after_rejection: first tokens of steps that follow a rejection; joint: [GROUPS] *
    TEXT; depth: how many tokens the first step accepted; draws: texts; next: first index that was not used yet.
    """

    first: np.ndarray
    accepted: np.ndarray
    recovered: np.ndarray
    bonus: np.ndarray
    after_rejection: np.ndarray
    joint: np.ndarray
    depth: np.ndarray
    draws: int = 0

    @classmethod
    def empty(cls, vocab: int, depth: int) -> Counts:
        shapes = dict.fromkeys(VECTORS, (vocab,)) | {"joint": (GROUPS,) * TEXT, "depth": (depth + 1,)}
        arrays: dict[str, Any] = {name: np.zeros(shape, dtype=np.int64) for name, shape in shapes.items()}
        return cls(**arrays)

    @classmethod
    def load(cls, path: Path) -> Counts:
        """Raises ValueError for a file that holds none."""
        try:
            arrays = arrays_in(path)
            return cls(**{name: arrays[name] for name in (*VECTORS, "joint", "depth")}, draws=int(arrays["draws"]))
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}: got no counts of the lab ({error}); delete it to begin anew") from None

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        fresh = path.with_name(path.name + ".new")
        with fresh.open("wb") as file:
            np.savez_compressed(file, **{name: getattr(self, name) for name in (*VECTORS, "joint", "depth", "draws")})
        fresh.replace(path)


def arrays_in(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, by name. Raises ValueError for a file that is damaged or holds anything else."""
    found: dict[str, np.ndarray] = {}
    with suppress(OSError, ValueError, EOFError, BadZipFile, zlib.error):
        if is_zipfile(path):
            with np.load(path, allow_pickle=False) as data:
                found = {name: data[name] for name in data.files}
    if not found or not all(isinstance(array, np.ndarray) for array in found.values()):
        raise ValueError(f"{path} is no .npz of plain arrays, or a damaged one; expected what numpy.savez writes")
    return found


def groups_of(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """int64 [V]: tokens in GROUPS groups; the draft gives the first half too much, the second too little.

    Accepted and recovered tokens differ most in these halves; inside a half the masses are about equal.
    """
    group = np.zeros(len(p), dtype=np.int64)
    half = GROUPS // 2
    for side, members in enumerate((np.nonzero(p < q)[0], np.nonzero(p >= q)[0])):
        mass = np.zeros(half)
        for token in members[np.argsort(-p[members], kind="stable")]:
            place = int(mass.argmin())
            mass[place] += p[token]
            group[token] = side * half + place
    return group


@dataclass(slots=True)
class Drawing:
    """Draws at one place under one rule, on `device`: `run` adds to `counts`, `file` keeps them. pick: how tokens are
    picked, one of `simulate.picks_for` (default: its first).
    """

    place: Place
    rule: Rule
    seed: int
    file: Path | None = None
    device: torch.device | str = "cpu"
    pick: str | None = None
    counts: Counts = field(init=False)
    simulator: Simulator = field(init=False)
    group: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.seed < SEEDS:
            raise ValueError(f"lab: got seed {self.seed}; expected 0..{SEEDS - 1} (each has 2^40 draws of its own)")
        p, q = (on_device(dists, self.device) for dists in (self.place.p, self.place.q))
        self.simulator = Simulator(self.rule, p, q, layout_for(self.rule, self.p.shape[0], self.pick))
        self.group = groups_of(self.p, self.q)
        self.counts = Counts.empty(self.simulator.vocab, max(self.simulator.layout.depth))
        if self.file is not None:
            self.keep(self.file)

    def keep(self, file: Path) -> None:
        """Keep the counts in a file from now on, and begin with those that are there."""
        self.file = file
        if file.exists():
            self._resume(file)

    @property
    def p(self) -> np.ndarray:
        """The target's distribution in float64 [V], of the row that the rule saw: what is tested against."""
        return self.place.base

    @property
    def q(self) -> np.ndarray:
        return self.place.draft

    @property
    def fingerprint(self) -> str:
        """What the counts belong to: distributions, rule, layout and seed."""
        words = (self.rule.name, self.simulator.layout, self.seed, TEXT, GROUPS, WHOLE)
        found = hashlib.sha256(repr(words).encode())
        for dists in (self.place.p, self.place.q):
            found.update(dists.probs().double().numpy().round(5).tobytes())
        return found.hexdigest()[:16]

    def _resume(self, file: Path) -> None:
        note = file.with_suffix(".json")
        told = json.loads(note.read_text("utf-8")) if note.exists() else {}
        if told.get("fingerprint") != self.fingerprint:
            raise ValueError(
                f"{file}: got draws of other distributions, another rule or another seed; expected those of this "
                f"call; take "
                "another --out, or delete the folder's draws"
            )
        self.counts = Counts.load(file)

    def save(self) -> None:
        """Keep the counts, if there is a file to keep them in."""
        if self.file is None:
            return
        note = {"fingerprint": self.fingerprint, "place": self.place.name, "rule": self.rule.name, "seed": self.seed}
        self.file.with_suffix(".json").write_text(json.dumps(note, indent=1), "utf-8")
        self.counts.save(self.file)

    def run(self, draws: int, tick: Callable[[int], None] = lambda count: None) -> None:
        """Draw until there are `draws` texts. Whatever interrupts, whole chunks are kept."""
        saved = self.counts.draws
        try:
            while self.counts.draws < draws:
                count = min(CHUNK, draws - self.counts.draws)
                self._chunk(self.counts.draws, count)
                tick(count)
                if self.counts.draws - saved >= 20 * CHUNK:
                    self.save()
                    saved = self.counts.draws
        finally:
            if self.counts.draws:
                self.save()

    @torch.inference_mode()
    def _chunk(self, start: int, count: int) -> None:
        seeds = torch.arange(start, start + count) + (self.seed << 40)
        texts = np.full((count, TEXT + max(self.simulator.layout.depth) + 1), -1, dtype=np.int64)
        length = np.zeros(count, dtype=np.int64)
        rejected = np.zeros(count, dtype=bool)
        fresh = Counts.empty(self.simulator.vocab, len(self.counts.depth) - 1)
        whole = np.arange(start, start + count) % WHOLE == 0
        root, first_step = len(self.place.tokens) - 1, True
        active = np.arange(count)
        while len(active):
            at = torch.from_numpy((root + length[active]).astype(np.int32))
            emitted, accepted, complete = self.simulator.step(seeds[active], at)
            self._count(fresh, emitted, accepted, complete, None if first_step else rejected[active])
            size = accepted + 1
            for place in range(emitted.shape[1]):
                some = active[place < size]
                texts[some, length[some] + place] = emitted[place < size, place]
            length[active] += size
            rejected[active] = ~complete
            first_step = False
            active = np.nonzero(whole & (length < TEXT))[0]
        cells = self.group[texts[whole, :TEXT]]
        np.add.at(fresh.joint, tuple(cells.T), 1)
        self._merge(fresh, count)

    @staticmethod
    def _count(
        fresh: Counts, emitted: np.ndarray, accepted: np.ndarray, complete: np.ndarray, follows: np.ndarray | None
    ) -> None:
        vocab = len(fresh.first)
        lead, last = emitted[:, 0], emitted[np.arange(len(emitted)), accepted]
        if follows is None:
            fresh.first += np.bincount(lead, minlength=vocab)
            fresh.accepted += np.bincount(lead[accepted > 0], minlength=vocab)
            fresh.recovered += np.bincount(lead[(accepted == 0) & ~complete], minlength=vocab)
            fresh.depth += np.bincount(accepted, minlength=len(fresh.depth))
        else:
            fresh.after_rejection += np.bincount(lead[follows], minlength=vocab)
        fresh.bonus += np.bincount(last[complete], minlength=vocab)

    def _merge(self, fresh: Counts, count: int) -> None:
        """All of a chunk or nothing: an interrupt between two additions must not tear the counts."""
        names = (*VECTORS, "joint", "depth")
        total: dict[str, Any] = {name: getattr(self.counts, name) + getattr(fresh, name) for name in names}
        self.counts = Counts(**total, draws=self.counts.draws + count)

    # -- verdicts ---------------------------------------------------------------------------------------------------

    def tests(self) -> list[Test]:
        """All tests of this place; each is exact or asymptotically so when the distribution holds."""
        counts, p = self.counts, self.p
        found = [
            named("first token, chi-square", chi_square(counts.first, p)),
            named("first token, G", g_test(counts.first, p)),
        ]
        if counts.bonus.sum():
            found.append(named("bonus tokens", chi_square(counts.bonus, p)))
        if counts.after_rejection.sum():
            found.append(named("first token after a rejection", chi_square(counts.after_rejection, p)))
        mass = np.bincount(self.group, weights=p, minlength=GROUPS)
        joint = mass
        for _ in range(TEXT - 1):
            joint = joint[..., None] * mass
        found.append(named(f"joint distribution of {TEXT} tokens", chi_square(counts.joint.ravel(), joint.ravel())))
        branches = branch_dists(self.simulator, p, self.q)
        if branches is not None:
            accepted, recovered = branches
            alpha = float(accepted.sum())
            for name, seen, dist in (
                ("accepted tokens", counts.accepted, accepted),
                ("recovered tokens", counts.recovered, recovered),
            ):
                if dist.sum() > 1e-9 and seen.sum():
                    found.append(named(name, chi_square(seen, dist / dist.sum())))
            found.append(rate_test("acceptance rate", int(counts.accepted.sum()), counts.draws, min(alpha, 1.0)))
        return found

    def summary(self) -> dict[str, Any]:
        """Rates beside their expected values, and the certified distance."""
        counts = self.counts
        branches = branch_dists(self.simulator, self.p, self.q)
        alpha = None if branches is None else float(branches[0].sum())
        return {
            "place": self.place.name,
            "draws": counts.draws,
            "acceptance_rate": float(counts.accepted.sum()) / max(counts.draws, 1),
            "expected_acceptance_rate": alpha,
            "overlap": float(np.minimum(self.p, self.q).sum()),
            "accepted_per_step": float((counts.depth * np.arange(len(counts.depth))).sum()) / max(counts.draws, 1),
            "certified_distance": certified_distance(counts.first, self.p),
            "row_error": self.place.row_error,
        }


def named(name: str, test: Test) -> Test:
    """The same test under a name that says what was tested."""
    return Test(name, test.statistic, test.degrees, test.p_value, test.draws, test.pooled, test.worst)


def branch_dists(simulator: Simulator, p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """How much of p(x) is accepted as the first token and how much is recovered, [V] each, adding up to p.

    Drawn chains: min(p, q). One drawn token z ~ q' outside the chosen set S: min(p, q') outside, all of p on S (Hu et
    al. 2025); nothing drawn: p on S. Independent siblings: round by round what is left of p. Coupled chains: 1 / sum_y
    max(p_y / p_x, q_y / q_x) (Daliri et al. 2024); of a rule that replays, other drafts know nothing of its choice x,
    which is accepted if it was drafted. None where the later siblings' distributions depend on earlier tokens.
    """
    group, pick = simulator.layout.siblings.get(0, []), simulator.layout.pick
    chosen, replays = list(simulator.chosen), simulator.rule.replays
    if pick == "coupled":
        if len(group) != 1 or not replays:
            return None
        accepted = np.minimum(coupled_matches(p, q), p)
    elif pick == "deterministic":
        accepted = np.zeros_like(p)
        accepted[chosen] = p[chosen]
    elif pick == "hybrid":
        rest = q.copy()
        rest[chosen] = 0.0
        rest = rest / rest.sum()
        accepted = p * rest if replays else np.minimum(p, rest)
        accepted[chosen] = p[chosen]
    elif pick == "without" and len(group) > 1:
        return None
    elif replays:
        accepted = p * (1 - (1 - q) ** len(group))
    else:
        accepted = _in_rounds(p, q, len(group))
    return accepted, p - accepted


def _in_rounds(p: np.ndarray, q: np.ndarray, rounds: int) -> np.ndarray:
    """How much of p(x) is accepted of independent draws from q that are tested one after another, [V]."""
    accepted, rest, alive = np.zeros_like(p), p, 1.0
    for _ in range(rounds):
        accepted = accepted + alive * np.minimum(rest, q)
        left = np.maximum(rest - q, 0.0)
        mass = left.sum()
        if mass <= 0:
            break
        rest, alive = left / mass, alive * mass
    return np.minimum(accepted, p)


def coupled_matches(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Chance that target and draft both choose x under shared Gumbel noise, [V], in O(V log V)."""
    both = (p > 0) & (q > 0)
    ratio = np.where(p > 0, q / np.where(p > 0, p, 1.0), np.inf)
    order = np.argsort(ratio, kind="stable")
    # q_y / q_x beats p_y / p_x exactly where q_y / p_y > q_x / p_x: sums over both sides of x in this order
    low_p = np.cumsum(p[order])
    high_q = q.sum() - np.cumsum(q[order])
    result = np.zeros(len(p))
    xs = order[both[order]]
    place = np.nonzero(both[order])[0]
    result[xs] = 1.0 / (low_p[place] / p[xs] + high_q[place] / q[xs])
    return result
