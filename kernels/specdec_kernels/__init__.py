"""Operators of speculative decoding: each a plain PyTorch reference beside faster kernels of the same contract.

Depends on torch alone at import; extensions are loaded by the first call that can use them. `explain()` says which
kernel serves what and why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# Every operator's name is also the name of its folder: importing it here makes `specdec_kernels.<name>` the operator.
from .chain_verify import chain_thresholds, chain_verify, chain_verify_logits
from .decoder_pass import DecoderLayer, DecoderTable, decoder_pass
from .dispatch import OPS, Backend, FallbackWarning, Op, UnsupportedError, explain, use_backend
from .draft_chain import draft_chain
from .draw_sample import draw_sample
from .edit_logits import ALWAYS, Additions, Forced, NodePaths, Penalties, TokenMasks, edit_logits
from .kv_commit import CacheTable, kv_commit, kv_commit_pages, kv_commit_scratch
from .kv_slots import kv_slots
from .kv_stage import kv_stage
from .law_stats import law_stats
from .names import RENAMED_OPERATORS, hint
from .ngram_match import ngram_match
from .ordered_verify import ordered_thresholds, ordered_verify
from .overlay import Overlay
from .overlay_edits import overlay_edits
from .replay_sample import replay_sample
from .replay_verify import replay_verify
from .row_linear import row_linear
from .traversal_verify import traversal_thresholds, traversal_verify
from .tree_attention import AttentionPlan, attention_plan, plan_for, tree_attention
from .tree_expand import tree_expand
from .tree_grow import Growth, tree_grow
from .tree_plan import TreePlan, tree_plan
from .tree_verify import tree_verify
from .typical_verify import typical_verify

__all__ = [
    "ALWAYS",
    "OPS",
    "Additions",
    "AttentionPlan",
    "Backend",
    "CacheTable",
    "DecoderLayer",
    "DecoderTable",
    "FallbackWarning",
    "Forced",
    "Growth",
    "NodePaths",
    "Op",
    "Overlay",
    "Penalties",
    "TokenMasks",
    "TreePlan",
    "UnsupportedError",
    "attention_plan",
    "chain_thresholds",
    "chain_verify",
    "chain_verify_logits",
    "decoder_pass",
    "draft_chain",
    "draw_sample",
    "edit_logits",
    "explain",
    "kv_commit",
    "kv_commit_pages",
    "kv_commit_scratch",
    "kv_slots",
    "kv_stage",
    "law_stats",
    "ngram_match",
    "ordered_thresholds",
    "ordered_verify",
    "overlay_edits",
    "plan_for",
    "replay_sample",
    "replay_verify",
    "row_linear",
    "traversal_thresholds",
    "traversal_verify",
    "tree_attention",
    "tree_expand",
    "tree_grow",
    "tree_plan",
    "tree_verify",
    "typical_verify",
    "use_backend",
]

if not TYPE_CHECKING:  # type checkers would take every name for an attribute

    def __getattr__(name: str) -> object:
        words = "" if name.startswith("_") else hint(name, __all__, RENAMED_OPERATORS, "operator")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{words}")
