"""Operators of speculative decoding. Each has a plain PyTorch reference and faster kernels with the same contract.

The import depends on torch alone. The first call that can use an extension loads it. `explain()` lists which kernel
serves each operator, and why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .dispatch.backend_request import use_backend
from .dispatch.operator import Backend, FallbackWarning, Op, UnsupportedError, explain
from .dispatch.registry import OPS
from .ops.batch_invariant_linear import batch_invariant_linear, stores_by_input
from .ops.batch_invariant_linear_int8 import batch_invariant_linear_int8, quantize_int8
from .ops.distribution_stats import distribution_stats
from .ops.draft_chain import draft_chain
from .ops.draft_sample import draft_sample
from .ops.exact_match_verify import exact_match_verify
from .ops.fused_forward import DecoderLayer, DecoderNumbers, DecoderTable, fused_forward
from .ops.kv_commit import CacheTable, kv_commit, kv_commit_pages, kv_commit_scratch
from .ops.kv_slots import kv_slots
from .ops.kv_stage import kv_stage
from .ops.ngram_match import ngram_match
from .ops.process_logits import ALWAYS, Additions, Forced, NodePaths, Penalties, TokenMasks, process_logits
from .ops.process_logits_overlay import process_logits_overlay
from .ops.recursive_rejection_verify import recursive_rejection_thresholds, recursive_rejection_verify

# An operator and its folder have the same name. These imports make `specdec_kernels.<name>` the operator.
from .ops.rejection_verify import rejection_thresholds, rejection_verify, rejection_verify_logits
from .ops.replay_sample import replay_sample
from .ops.replay_verify import replay_verify
from .ops.state_commit import state_commit, window_commit
from .ops.traversal_verify import traversal_thresholds, traversal_verify
from .ops.tree_attention import AttentionPlan, attention_plan, plan_for, tree_attention
from .ops.tree_conv import tree_conv
from .ops.tree_delta import tree_delta
from .ops.tree_expand import tree_expand
from .ops.tree_grow import Growth, tree_grow
from .ops.tree_plan import TreePlan, tree_plan
from .ops.tree_ssm import tree_ssm
from .ops.typical_verify import typical_verify
from .overlay import Overlay
from .unknown_names import RENAMED_OPERATORS, hint

__all__ = [
    "ALWAYS",
    "OPS",
    "Additions",
    "AttentionPlan",
    "Backend",
    "CacheTable",
    "DecoderLayer",
    "DecoderNumbers",
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
    "batch_invariant_linear",
    "batch_invariant_linear_int8",
    "distribution_stats",
    "draft_chain",
    "draft_sample",
    "exact_match_verify",
    "explain",
    "fused_forward",
    "kv_commit",
    "kv_commit_pages",
    "kv_commit_scratch",
    "kv_slots",
    "kv_stage",
    "ngram_match",
    "plan_for",
    "process_logits",
    "process_logits_overlay",
    "quantize_int8",
    "recursive_rejection_thresholds",
    "recursive_rejection_verify",
    "rejection_thresholds",
    "rejection_verify",
    "rejection_verify_logits",
    "replay_sample",
    "replay_verify",
    "state_commit",
    "stores_by_input",
    "traversal_thresholds",
    "traversal_verify",
    "tree_attention",
    "tree_conv",
    "tree_delta",
    "tree_expand",
    "tree_grow",
    "tree_plan",
    "tree_ssm",
    "typical_verify",
    "use_backend",
    "window_commit",
]

if not TYPE_CHECKING:  # type checkers would take every name for an attribute

    def __getattr__(name: str) -> object:
        words = "" if name.startswith("_") else hint(name, __all__, RENAMED_OPERATORS, "operator")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{words}")
