"""Counts of many draws at one position, stored on disk during a run, and tests against the target's distribution.

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
"""Tokens of a whole text: enough for two steps, whose random numbers must be independent."""
GROUPS = 6
"""Cells per token of the joint test."""
CHUNK = 20_000
"""Draws per batch."""
WHOLE = 4
"""Every WHOLE-th draw continues to a text of TEXT tokens; the others end after their first step."""
SEEDS = 2**22
"""Number of seeds of a run. Each has 2^40 request seeds of its own, all below FIRST_SEED."""
VECTORS = ("first", "accepted", "recovered", "bonus", "after_rejection")
"""Fields of `Counts` that have one entry per token."""


@dataclass(slots=True)
class Counts:
    """Counts at one position.

    Attributes:
        first: First tokens of all draws, int64 [V].
        accepted: First tokens that are accepted draft tokens, int64 [V].
        recovered: First tokens that replace a rejected draft token, int64 [V].
        bonus: Tokens sampled after all draft tokens were accepted, int64 [V].
        after_rejection: First tokens of steps that follow a rejection, int64 [V].
        joint: Groups of the tokens of whole texts, int64 [GROUPS, ...] with TEXT dimensions.
        depth: Number of first steps by accepted tokens, int64 [depth + 1].
        draws: Number of draws.
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
        """Returns counts of zero for a vocabulary and the greatest depth of a draft."""
        shapes = dict.fromkeys(VECTORS, (vocab,)) | {"joint": (GROUPS,) * TEXT, "depth": (depth + 1,)}
        arrays: dict[str, Any] = {name: np.zeros(shape, dtype=np.int64) for name, shape in shapes.items()}
        return cls(**arrays)

    @classmethod
    def load(cls, path: Path) -> Counts:
        """Reads the counts of a file.

        Returns:
            The counts.

        Raises:
            ValueError: If the file has no counts.
        """
        try:
            arrays = arrays_in(path)
            return cls(**{name: arrays[name] for name in (*VECTORS, "joint", "depth")}, draws=int(arrays["draws"]))
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}: got no counts of the lab ({error}); delete it to begin anew") from None

    def save(self, path: Path) -> None:
        """Writes the file atomically."""
        fresh = path.with_name(path.name + ".new")
        with fresh.open("wb") as file:
            np.savez_compressed(file, **{name: getattr(self, name) for name in (*VECTORS, "joint", "depth", "draws")})
        fresh.replace(path)


def arrays_in(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of an .npz file by name.

    Returns:
        The arrays.

    Raises:
        ValueError: If the file is damaged or has anything but plain arrays.
    """
    found: dict[str, np.ndarray] = {}
    with suppress(OSError, ValueError, EOFError, BadZipFile, zlib.error):
        if is_zipfile(path):
            with np.load(path, allow_pickle=False) as data:
                found = {name: data[name] for name in data.files}
    if not found or not all(isinstance(array, np.ndarray) for array in found.values()):
        raise ValueError(f"{path} is no .npz of plain arrays, or a damaged one; expected what numpy.savez writes")
    return found


def groups_of(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Assigns tokens to GROUPS groups of similar probability under p.

    Tokens with q > p are in the first half of the groups, the others in the second. Accepted and recovered tokens
    differ most between these halves.

    Returns:
        Group of every token, int64 [V].
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
    """Draws at one position under one rule. `run` adds to `counts`.

    Attributes:
        place: The position.
        rule: The rule under test.
        seed: Seed of the run, below SEEDS.
        file: File that stores the counts. None keeps them in memory.
        device: Device of the draws.
        pick: How draft tokens are selected, one of `simulator.picks_for`. None selects the first of them.
        counts: Counts so far.
        simulator: Steps of the rule at the position.
        group: Group of every token in the joint test, int64 [V].
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
        """Stores the counts in a file from now on, and continues with those that it has."""
        self.file = file
        if file.exists():
            self._resume(file)

    @property
    def p(self) -> np.ndarray:
        """The target's distribution at the verified row, float64 [V]. Counts are tested against it."""
        return self.place.base

    @property
    def q(self) -> np.ndarray:
        """The draft's distribution, float64 [V]."""
        return self.place.draft

    @property
    def fingerprint(self) -> str:
        """Hash of the distributions, rule, layout and seed that the counts belong to."""
        words = (self.rule.name, self.simulator.layout, self.seed, TEXT, GROUPS, WHOLE)
        found = hashlib.sha256(repr(words).encode())
        for dists in (self.place.p, self.place.q):
            found.update(dists.probs().double().numpy().round(5).tobytes())
        return found.hexdigest()[:16]

    def _resume(self, file: Path) -> None:
        note = file.with_suffix(".json")
        stored = json.loads(note.read_text("utf-8")) if note.exists() else {}
        if stored.get("fingerprint") != self.fingerprint:
            raise ValueError(
                f"{file}: got draws of other distributions, another rule or another seed; expected those of this "
                "call; take another --out, or delete the folder's draws"
            )
        self.counts = Counts.load(file)

    def save(self) -> None:
        """Writes the counts to the file, if there is one."""
        if self.file is None:
            return
        note = {"fingerprint": self.fingerprint, "place": self.place.name, "rule": self.rule.name, "seed": self.seed}
        self.file.with_suffix(".json").write_text(json.dumps(note, indent=1), "utf-8")
        self.counts.save(self.file)

    def run(self, draws: int, tick: Callable[[int], None] = lambda count: None) -> None:
        """Draws until there are `draws` draws. An interrupt loses at most the current batch."""
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
        """Counts one batch of draws."""
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
        """Counts the tokens of one step. `follows` marks rows after a rejection; None stands for first steps."""
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
        """Adds the counts of a batch in one assignment, so that an interrupt cannot leave them inconsistent."""
        names = (*VECTORS, "joint", "depth")
        total: dict[str, Any] = {name: getattr(self.counts, name) + getattr(fresh, name) for name in names}
        self.counts = Counts(**total, draws=self.counts.draws + count)

    # -- verdicts ---------------------------------------------------------------------------------------------------

    def tests(self) -> list[Test]:
        """Runs all tests of this position. P-values are exact, or asymptotically exact."""
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
        """Returns rates with their expected values, and the certified distance."""
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
    """Renames a test."""
    return Test(name, test.statistic, test.degrees, test.p_value, test.draws, test.pooled, test.worst)


def branch_dists(simulator: Simulator, p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Splits p into the parts that are accepted and recovered as the first token.

    - Sampled chains: min(p, q) is accepted.
    - Hybrid nodes: min(p, q') outside the deterministic tokens, all of p on them (Hu et al. 2025).
    - Deterministic tokens: p on these tokens.
    - Independent siblings: what each round accepts of the residual.
    - Coupled chains: 1 / sum_y max(p_y / p_x, q_y / q_x) (Daliri et al. 2024).
    - Rules that replay, without coupling: the target's choice is accepted if it is in the draft.

    Args:
        simulator: Steps of the rule.
        p: The target's distribution, float64 [V].
        q: The draft's distribution, float64 [V].

    Returns:
        The accepted and the recovered part of p, float64 [V] each. None if there is no closed form.
    """
    group, pick = simulator.layout.siblings.get(0, []), simulator.layout.pick
    fixed, replays = list(simulator.deterministic_tokens), simulator.rule.replays
    if pick == "coupled":
        if len(group) != 1 or not replays:
            return None
        accepted = np.minimum(coupled_matches(p, q), p)
    elif pick == "deterministic":
        accepted = np.zeros_like(p)
        accepted[fixed] = p[fixed]
    elif pick == "hybrid":
        rest = q.copy()
        rest[fixed] = 0.0
        rest = rest / rest.sum()
        accepted = p * rest if replays else np.minimum(p, rest)
        accepted[fixed] = p[fixed]
    elif pick == "without" and len(group) > 1:
        return None
    elif replays:
        accepted = p * (1 - (1 - q) ** len(group))
    else:
        accepted = _in_rounds(p, q, len(group))
    return accepted, p - accepted


def _in_rounds(p: np.ndarray, q: np.ndarray, rounds: int) -> np.ndarray:
    """Part of p that is accepted of independent samples of q, tested one after another, [V]."""
    accepted, rest, reached = np.zeros_like(p), p, 1.0
    for _ in range(rounds):
        accepted = accepted + reached * np.minimum(rest, q)
        left = np.maximum(rest - q, 0.0)
        mass = left.sum()
        if mass <= 0:
            break
        rest, reached = left / mass, reached * mass
    return np.minimum(accepted, p)


def coupled_matches(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Returns the probability that target and draft both sample x with the same Gumbel noise, [V], in O(V log V)."""
    both = (p > 0) & (q > 0)
    ratio = np.where(p > 0, q / np.where(p > 0, p, 1.0), np.inf)
    order = np.argsort(ratio, kind="stable")
    # q_y / q_x exceeds p_y / p_x exactly where q_y / p_y > q_x / p_x: sum over both sides of x in this order
    low_p = np.cumsum(p[order])
    high_q = q.sum() - np.cumsum(q[order])
    result = np.zeros(len(p))
    xs = order[both[order]]
    place = np.nonzero(both[order])[0]
    result[xs] = 1.0 / (low_p[place] / p[xs] + high_q[place] / q[xs])
    return result
