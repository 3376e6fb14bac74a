"""specdec-fast: lossless speculative decoding, with kernels, verification rules, drafters and a small engine.

`load` builds an `Engine`, which turns prompts into `Handle`s under `SamplingParams`. Names are imported when they are
first used, so `import specdec_fast` loads neither torch nor transformers. Tests: tests/test_interfaces.py.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {  # exported name -> module that defines it
    "Acceptance": "interfaces",
    "Budget": "interfaces",
    "Draft": "core.draft",
    "ProposalKind": "core.proposal_kind",
    "Engine": "engine.engine",
    "Handle": "engine.request",
    "LogitsProcessor": "sampling.custom_processors",
    "HuggingFaceTarget": "targets.huggingface",
    "TokenDistributions": "core.distributions",
    "Needs": "interfaces",
    "Rng": "interfaces",
    "SamplingParams": "sampling.params",
    "get_drafter": "drafters",
    "get_rule": "rules",
    "load": "loading",
    "verify": "embedding",
    "verify_packed": "embedding",
    "verify_trees": "embedding",
}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from specdec_fast.core.distributions import TokenDistributions as TokenDistributions
    from specdec_fast.core.draft import Draft as Draft
    from specdec_fast.core.proposal_kind import ProposalKind as ProposalKind
    from specdec_fast.drafters import get_drafter as get_drafter
    from specdec_fast.embedding import verify as verify
    from specdec_fast.embedding import verify_packed as verify_packed
    from specdec_fast.embedding import verify_trees as verify_trees
    from specdec_fast.engine.engine import Engine as Engine
    from specdec_fast.engine.request import Handle as Handle
    from specdec_fast.interfaces import Acceptance as Acceptance
    from specdec_fast.interfaces import Budget as Budget
    from specdec_fast.interfaces import Needs as Needs
    from specdec_fast.interfaces import Rng as Rng
    from specdec_fast.loading import load as load
    from specdec_fast.rules import get_rule as get_rule
    from specdec_fast.sampling.custom_processors import LogitsProcessor as LogitsProcessor
    from specdec_fast.sampling.params import SamplingParams as SamplingParams
    from specdec_fast.targets.huggingface import HuggingFaceTarget as HuggingFaceTarget


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    if name.startswith("_"):  # tools look for such names; a hint would load torch
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from specdec_fast.core.former_names import missing_attribute

    raise missing_attribute(f"module {__name__!r}", name, _HOME)
