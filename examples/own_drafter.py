"""A custom drafter: tokens that followed the newest token before may follow it again."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from specdec_fast import SamplingParams, load
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Budget, Needs, Rng, StateView, TargetOutput

PROMPT = "1 The sons of Judah; Er, and Onan, and Shelah.\n2 The sons of Levi; Gershon, and Kohath.\n3 The sons of"


class EchoDrafter:
    """Drafts the tokens behind the last earlier occurrence of the newest token."""

    name = "echo"
    needs = Needs(topology="chain", host_tokens=True)

    def __init__(self, num_draft_tokens: int = 3) -> None:
        self.num_draft_tokens = num_draft_tokens

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None: ...

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        chains = []
        for row, limit in zip(rows, budget.nodes):
            *before, newest = view.tokens(row)
            at = len(before) - before[::-1].index(newest) if newest in before else len(before)
            chains.append([newest, *before[at : at + limit]])
        return Draft.chains(rows, chains, device=view.device)

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None: ...

    def release(self, rows: Sequence[int]) -> None: ...


def install(folder: Path) -> None:
    """What `pip install` makes of these lines of a pyproject.toml:
    [project.entry-points."specdec_fast.drafters"]
    echo = "own_drafter:EchoDrafter"
    """
    (info := folder / "own_drafter-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-drafter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[specdec_fast.drafters]\necho = own_drafter:EchoDrafter\n")
    sys.path[:0] = [str(folder), str(Path(__file__).parent)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as packages:
        install(Path(packages))
        engine = load("demo-target", drafter="echo", max_rows=1)
        handle = engine.generate([PROMPT], SamplingParams(temperature=0, max_new_tokens=64))[0]
    print(handle.text)
    print(f"drafter echo: {handle.stats.num_draft_tokens} drafted, {handle.stats.tau:.2f} tokens per target pass")
