"""A sequential test that may be read after every run: evidence accumulates, and the error rate still holds.

The test uses the Dirichlet mixture martingale of multinomial counts c against the distribution p:
E = [B(m p + c) / B(m p)] / prod p_i^c_i. If p is true, its expectation is 1 at every n, so the probability that it
ever reaches 1 / level is at most `level`. The mean over several concentrations m is a martingale too. Evidence about
different distributions is combined by a weighted sum, which needs no independence. The weights are fixed before the
first draw, so distributions may join later.

Source: Ville 1939; Robbins 1970; Lindon and Malek 2022, section 3; Vovk and Wang 2021.
Tests: tests/lab/test_sequential_test.py.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specdec_fast.lab.statistics import check_counts, check_dist

CONCENTRATIONS = (1e2, 1e3, 1e4, 1e5, 1e6, 1e7)
MOST_BINS = 64


def log_evidence(counts: Any, dist: Any) -> float:
    """Returns the natural logarithm of E; infinite if an impossible outcome was observed.

    Args:
        counts: Observed counts, int64 [k].
        dist: Probabilities, float64 [k].
    """
    from scipy.special import gammaln, logsumexp

    dist = check_dist(dist)
    counts = check_counts(counts, dist)
    if counts[dist == 0].any():
        return float("inf")
    p, c = dist[dist > 0], counts[dist > 0].astype(np.float64)
    null = float((c * np.log(p)).sum())
    terms = []
    for m in CONCENTRATIONS:
        mixture = gammaln(m) - gammaln(m + c.sum()) + (gammaln(m * p + c) - gammaln(m * p)).sum()
        terms.append(float(mixture) - null)
    return float(logsumexp(terms) - np.log(len(terms)))


def assign_cells(dist: Any, most: int = MOST_BINS) -> np.ndarray:
    """Assigns bins to at most `most` cells: the most likely bins have cells of their own, and the others share one.

    Returns:
        Cell of every bin, int64 [k].
    """
    dist = check_dist(dist)
    cell = np.full(len(dist), min(most, len(dist)) - 1, dtype=np.int64)
    top = np.argsort(-dist, kind="stable")[: most - 1]
    cell[top] = np.arange(len(top))
    return cell


@dataclass(slots=True)
class Ledger:
    """Counts of all runs, by distribution under test, in a JSON file.

    Attributes:
        path: The file; None keeps the ledger in memory.
        level: Level of the sequential test.
        next_seed: Seed of the next run, so that no draw is counted twice.
        entries: Grouped counts and evidence, by name and fingerprint of the distribution.
        runs: Number of runs.
    """

    path: Path | None = None
    level: float = 1e-3
    next_seed: int = 0
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: int = 0

    @classmethod
    def open(cls, path: Path | None, level: float = 1e-3) -> Ledger:
        """Opens the ledger of a file, or an empty one.

        Args:
            path: The file; None keeps the ledger in memory.
            level: Level of the sequential test.

        Returns:
            The ledger.

        Raises:
            ValueError: If the file is not a ledger.
        """
        if path is None or not path.exists():
            return cls(path, level)
        try:
            data = json.loads(path.read_text("utf-8"))
            entries = {  # earlier versions wrote `law`
                name: {"dist" if key == "law" else key: value for key, value in entry.items()}
                for name, entry in dict(data["entries"]).items()
            }
            return cls(path, level, int(data["next_seed"]), entries, int(data["runs"]))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path}: got no ledger of the lab ({error}); expected its JSON; name another file"
            ) from None

    def add(self, name: str, counts: Any, dist: Any) -> float:
        """Adds the counts of one run.

        A distribution that has changed, for example because of another model, starts a new entry.

        Args:
            name: Name of the distribution.
            counts: Observed counts, int64 [k].
            dist: Probabilities, float64 [k].

        Returns:
            Log-evidence over all runs.
        """
        dist = check_dist(dist)
        cell = assign_cells(dist)
        grouped_dist = np.bincount(cell, weights=dist)
        grouped = np.bincount(cell, weights=check_counts(counts, dist).astype(np.float64)).astype(np.int64)
        # logits differ in the last bits between machines, so cells are compared to six digits
        print_ = hashlib.sha256(np.round(grouped_dist, 6).tobytes() + np.argsort(-dist, kind="stable")[:8].tobytes())
        key = f"{name}:{print_.hexdigest()[:12]}"
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = {"dist": grouped_dist.tolist(), "counts": [0] * len(grouped), "runs": 0}
        kept_dist = np.asarray(entry["dist"])
        total = np.asarray(entry["counts"], dtype=np.int64) + grouped
        entry["counts"], entry["runs"] = total.tolist(), int(entry["runs"]) + 1
        entry["log_evidence"] = log_evidence(total, kept_dist / kept_dist.sum())
        return float(entry["log_evidence"])

    def log_total(self) -> float:
        """Returns the logarithm of the evidence of all entries together; reaching -log(level) rejects.

        Entry k, in the order of creation, has the weight 1 / (k (k + 1)). Future entries have evidence 1 and a total
        weight of 1 / (K + 1) after K entries, so a new distribution changes nothing.
        """
        from scipy.special import logsumexp

        found = np.array([0.0, *(float(entry["log_evidence"]) for entry in self.entries.values())])
        place = np.arange(1, len(found))
        weights = np.array([1 / len(found), *(1 / (place * (place + 1)))])
        return float(logsumexp(found + np.log(weights)))

    @property
    def rejects(self) -> bool:
        """Whether the evidence rejects at `level`."""
        return self.log_total() >= -math.log(self.level)

    def save(self) -> None:
        """Writes the file; a kill leaves the old one."""
        if self.path is None:
            return
        data = {"next_seed": self.next_seed, "runs": self.runs, "entries": self.entries}
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text(json.dumps(data, indent=1), "utf-8")
        fresh.replace(self.path)
