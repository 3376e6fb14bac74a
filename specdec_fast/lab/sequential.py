"""A test that may be looked at after every run: evidence accumulates over nights and the error rate still holds.

The Dirichlet mixture martingale of multinomial counts c against the law p (Ville 1939; Robbins 1970; Lindon and Malek
2022, section 3): E = [B(m p + c) / B(m p)] / prod p_i^c_i has expectation 1 at every n if p is true, so the chance that
it ever reaches 1 / level is at most `level`. The mean over several concentrations m is again one. Different laws under
test are combined by a weighted sum of their E, which needs no independence (Vovk and Wang 2021); weights are settled
before there is a draw, so the sum is a martingale however many laws join later. Tests: tests/lab/test_sequential.py.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specdec_fast.lab.statistics import check_counts, check_law

CONCENTRATIONS = (1e2, 1e3, 1e4, 1e5, 1e6, 1e7)
MOST_BINS = 64


def log_evidence(counts: Any, law: Any) -> float:
    """Natural logarithm of E for counts [k] against the law [k]; infinite when something impossible was seen."""
    from scipy.special import gammaln, logsumexp

    law = check_law(law)
    counts = check_counts(counts, law)
    if counts[law == 0].any():
        return float("inf")
    p, c = law[law > 0], counts[law > 0].astype(np.float64)
    null = float((c * np.log(p)).sum())
    terms = []
    for m in CONCENTRATIONS:
        mixture = gammaln(m) - gammaln(m + c.sum()) + (gammaln(m * p + c) - gammaln(m * p)).sum()
        terms.append(float(mixture) - null)
    return float(logsumexp(terms) - np.log(len(terms)))


def few_bins(law: Any, most: int = MOST_BINS) -> np.ndarray:
    """int64 [k]: the cell of every bin when the likeliest `most - 1` keep their own and the rest share one."""
    law = check_law(law)
    cell = np.full(len(law), min(most, len(law)) - 1, dtype=np.int64)
    top = np.argsort(-law, kind="stable")[: most - 1]
    cell[top] = np.arange(len(top))
    return cell


@dataclass(slots=True)
class Ledger:
    """Counts of all runs so far, per law under test, in a JSON file; `next_seed` makes sure no draw is used twice."""

    path: Path | None = None
    level: float = 1e-3
    next_seed: int = 0
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: int = 0

    @classmethod
    def open(cls, path: Path | None, level: float = 1e-3) -> Ledger:
        """The ledger of a file, or an empty one. Raises ValueError for a file that is none."""
        if path is None or not path.exists():
            return cls(path, level)
        try:
            data = json.loads(path.read_text("utf-8"))
            return cls(path, level, int(data["next_seed"]), dict(data["entries"]), int(data["runs"]))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path}: got no ledger of the lab ({error}); expected its JSON; name another file"
            ) from None

    def add(self, name: str, counts: Any, law: Any) -> float:
        """Add the counts of one run under a law's name; the log-evidence over all runs.

        A law that has changed (another model, other sampling) begins a new entry: old draws say nothing about it.
        """
        law = check_law(law)
        cell = few_bins(law)
        grouped_law = np.bincount(cell, weights=law)
        grouped = np.bincount(cell, weights=check_counts(counts, law).astype(np.float64)).astype(np.int64)
        # logits differ in the last bits between machines; a law is the same if its cells are, to six digits
        print_ = hashlib.sha256(np.round(grouped_law, 6).tobytes() + np.argsort(-law, kind="stable")[:8].tobytes())
        key = f"{name}:{print_.hexdigest()[:12]}"
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = {"law": grouped_law.tolist(), "counts": [0] * len(grouped), "runs": 0}
        kept_law = np.asarray(entry["law"])
        total = np.asarray(entry["counts"], dtype=np.int64) + grouped
        entry["counts"], entry["runs"] = total.tolist(), int(entry["runs"]) + 1
        entry["log_evidence"] = log_evidence(total, kept_law / kept_law.sum())
        return float(entry["log_evidence"])

    def log_total(self) -> float:
        """Log of the evidence of all entries together: reaching -log(level) rejects.

        The k-th entry, in the order in which they were opened, has the weight 1 / (k (k + 1)). The weights of those to
        come add up to 1 / (K + 1) behind the K-th, and their evidence is 1: a law that joins changes nothing.
        """
        from scipy.special import logsumexp

        found = np.array([0.0, *(float(entry["log_evidence"]) for entry in self.entries.values())])
        place = np.arange(1, len(found))
        weights = np.array([1 / len(found), *(1 / (place * (place + 1)))])
        return float(logsumexp(found + np.log(weights)))

    @property
    def rejects(self) -> bool:
        return self.log_total() >= -math.log(self.level)

    def save(self) -> None:
        """Write the file, whole or not at all."""
        if self.path is None:
            return
        data = {"next_seed": self.next_seed, "runs": self.runs, "entries": self.entries}
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text(json.dumps(data, indent=1), "utf-8")
        fresh.replace(self.path)
