"""What another engine calls on its own tensors: verification in one line, and conversions between layouts of drafts.

The functions know neither this project's engine nor its models.
"""

from __future__ import annotations

from specdec_fast.embedding.flat_chains import chains_from_flat, flat_from_chains
from specdec_fast.embedding.link_verification import verify_links
from specdec_fast.embedding.node_order import parent_first
from specdec_fast.embedding.tree_links import TreeLinks, links_from_parents, parents_from_links
from specdec_fast.embedding.tree_masks import mask_from_parents, parents_from_mask
from specdec_fast.embedding.tree_paths import (
    choices_from_parents,
    parents_from_choices,
    parents_from_paths,
    paths_from_parents,
)
from specdec_fast.embedding.verification import emitted_tokens, verify, verify_packed, verify_trees

__all__ = [
    "TreeLinks",
    "chains_from_flat",
    "choices_from_parents",
    "emitted_tokens",
    "flat_from_chains",
    "links_from_parents",
    "mask_from_parents",
    "parent_first",
    "parents_from_choices",
    "parents_from_links",
    "parents_from_mask",
    "parents_from_paths",
    "paths_from_parents",
    "verify",
    "verify_links",
    "verify_packed",
    "verify_trees",
]
