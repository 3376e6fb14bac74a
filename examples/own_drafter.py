"""A drafter of one's own: it repeats the last token, and is found by its name like those of the package."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from specdec_fast import SamplingParams, load
from specdec_fast.draft import Draft
from specdec_fast.interfaces import Acceptance, Budget, Needs, Rng, StateView, TargetOutput


class StutterDrafter:
    """Drafts the newest token again and again."""

    name = "stutter"
    needs = Needs(topology="chain", host_tokens=True)

    def __init__(self, num_draft_tokens: int = 2) -> None:
        self.num_draft_tokens = num_draft_tokens

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        pass

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        chains = [[view.tokens(row)[-1]] * (1 + limit) for row, limit in zip(rows, budget.nodes)]
        return Draft.chains(rows, chains, device=view.device)

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        pass

    def release(self, rows: Sequence[int]) -> None:
        pass


def install(folder: Path) -> None:
    """What `pip install` makes of these lines of a pyproject.toml:

    [project.entry-points."specdec_fast.drafters"]
    stutter = "own_drafter:StutterDrafter"
    """
    info = folder / "own_drafter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-drafter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[specdec_fast.drafters]\nstutter = own_drafter:StutterDrafter\n")
    sys.path[:0] = [str(folder), str(Path(__file__).parent)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        engine = load("demo-target", drafter="stutter", drafter_options={"num_draft_tokens": 3}, max_rows=1)
        handle = engine.generate(["Once upon a time"], SamplingParams(seed=1, max_new_tokens=48))[0]
    print(handle.text)
    print(
        f"drafter {engine.drafter.name}: {handle.stats.drafted} drafted, {handle.stats.tau:.2f} tokens per target pass"
    )
