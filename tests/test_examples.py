"""Every example runs on the bundled pair in short time, and prints what its docstring says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

FAMILIES = ("medusa_heads.py", "blockwise_heads.py", "eagle_head.py", "mtp_module.py")
"""One for each family of trained heads."""
SAYS = {
    "generate.py": ["64 tokens", "tokens per target pass"],
    "blockwise_heads.py": ["held-out loss", "same text: True", "tokens per target pass"],
    "batch.py": ["too long leaves, cancelled", "one verse joins", "without speculation: True"],
    "own_drafter.py": ["drafter echo", "drafted", "tokens per target pass"],
    "eagle_head.py": ["held-out loss", "same text: True", "tokens per target pass"],
    "embed_ops.py": ["tree_attention  cpu", "request 0: path", "tokens committed"],
    "medusa_heads.py": ["held-out loss", "same text: True", "tokens per target pass"],
    "mtp_module.py": ["held-out loss", "same text: True", "tokens per target pass"],
    "hybrid.py": ["T = 0: ", "T = 1: ", "with drafts; same texts: True", "And it came to pass"],
    "grammar.py": [" eos", "chapter: ", "same texts without speculation: True"],
    "tensor_parallel.py": ["24 tokens, tau", "processes: 1"],
    "serve_ray.py": ["2 replicas answer", "True"],
    "vllm_plugin.py": ["same seed, same text: True", "tokens per target pass"],
    "transformers_generate.py": ["And it came to pass", "same text: True", "tokens per target pass"],
    "custom_loop.py": ["nodes tried", "accepted", "tokens per target pass"],
}
NEEDS = {"grammar.py": "llguidance", "serve_ray.py": "ray", "vllm_plugin.py": "vllm"}


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)


def test_a_drafter_of_one_s_own_is_short() -> None:
    assert len((EXAMPLES / "own_drafter.py").read_text().splitlines()) < 60


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_of_heads_takes_less_than_forty_lines(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 40


@pytest.mark.parametrize("name", sorted(SAYS))
def test_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    shown = capsys.readouterr().out
    for words in SAYS[name]:
        assert words in shown
