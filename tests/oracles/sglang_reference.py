"""SGLang's own Triton kernels on a CPU: its trees and its greedy verification, as JSON. Run as a program.

`python sglang_reference.py FOLDER` with the folder that holds the package `sglang`. Other modules of it are replaced by
stubs, since they need its GPU libraries.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

REAL = "sglang.kernels.ops.speculative.spec_tree"


class Anything:
    """Stands for every function of a stubbed module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Says no: no GPU of any kind is there."""
        return False

    def __getattr__(self, name: str) -> Any:
        return Anything()


class Stub(types.ModuleType):
    """A module with every name."""

    __path__ = ()  # a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Finder:
    """Finds one real module of the package, and stubs for the others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Returns the spec of a module of the package."""
        if name.split(".")[0] not in ("sglang", "sgl_kernel"):
            return None
        if name == REAL:
            return importlib.util.spec_from_file_location(name, self.folder / f"{name.replace('.', '/')}.py")
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        """Returns a stub."""
        return Stub(spec.name)

    def exec_module(self, module: Any) -> None:
        """Does nothing."""


def run(folder: Path) -> dict[str, Any]:
    """Builds random EAGLE trees and verifies them greedily, by SGLang's kernels."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.meta_path.insert(0, Finder(folder))  # type: ignore[arg-type]
    import torch

    kernels = importlib.import_module(REAL)
    source = torch.Generator().manual_seed(0)
    rows, top_k, steps, nodes, vocab = 6, 3, 3, 8, 4
    # EAGLE's layout: top_k tokens of the root, then top_k children of each of the top_k best nodes, per step
    grown = top_k + (steps - 1) * top_k * top_k
    selected, parents = [], []
    for _ in range(rows):
        # parent list: -1 for the root, then the top_k nodes that each further step grew from
        listed = [-1, *range(top_k)]
        for step in range(1, steps - 1):
            first = top_k + (step - 1) * top_k * top_k
            picked = torch.randperm(top_k * top_k, generator=source)[:top_k].sort().values + first
            listed += picked.tolist()
        chosen: list[int] = []
        while len(chosen) < nodes - 1:  # parents first, as the best scores are
            free = []
            for node in range(grown):
                before = node // top_k
                ready = before == 0 or listed[before] in chosen
                if ready and node not in chosen:
                    free.append(node)
            chosen.append(free[int(torch.randint(len(free), (1,), generator=source))])
        selected.append(sorted(chosen))
        parents.append(listed)
    lengths = torch.arange(rows) + 5
    buffers = torch.full((3, rows, nodes), -1, dtype=torch.long)
    positions = torch.empty(rows * nodes, dtype=torch.long)
    mask = torch.full((rows * nodes * nodes,), True)
    kernels.sgl_build_tree_kernel_triton(
        torch.tensor(parents), torch.tensor(selected), lengths, mask, positions, *buffers, top_k, steps, nodes,
        kernels.TreeMaskMode.QLEN_ONLY,
    )  # fmt: skip
    tokens = torch.randint(0, vocab, (rows, nodes), generator=source)
    logits = torch.randn(rows * nodes, vocab, generator=source)
    predict = torch.zeros(rows * nodes, dtype=torch.int32)
    accept_index = torch.full((rows, steps + 1), -1, dtype=torch.int32)
    correct = torch.empty(rows, dtype=torch.int32)
    kernels.verify_tree_greedy_triton(
        predict, accept_index, correct, tokens, *buffers, logits.argmax(1).reshape(rows, nodes)
    )
    found = {
        "index": buffers[0],
        "next_token": buffers[1],
        "next_sibling": buffers[2],
        "mask": mask.view(rows, nodes, nodes),
        "positions": positions.view(rows, nodes),
        "lengths": lengths,
        "tokens": tokens,
        "logits": logits,
        "predict": predict,
        "correct": correct,
        "accept_index": accept_index,
    }
    return {name: value.tolist() for name, value in found.items()}


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]))))
