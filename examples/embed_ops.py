"""One decoding step of a serving stack that brings its own model and cache, with the operators on plain tensors.

Two requests, trees of 7 and 4 nodes, one attention layer with random weights in place of a model. Run it anywhere:

    python examples/embed_ops.py            # on a GPU if there is one
"""

from __future__ import annotations

import torch

from specdec_fast import Draft, verify_trees
from specdec_kernels import CacheTable, explain, kv_commit, kv_slots, kv_stage, tree_attention

HEADS, KV_HEADS, WIDTH, VOCAB, PAGE = 8, 2, 64, 1000, 16
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)

# The stack owns a paged cache (any strides), a page table, and how much of every request is committed.
keys, values = (torch.randn(32, PAGE, KV_HEADS, WIDTH, device=device) for _ in range(2))
page_table = torch.arange(1, 17, dtype=torch.int32, device=device).view(2, 8)
lengths, rows = (torch.tensor(own, dtype=torch.int32, device=device) for own in ((40, 21), (0, 1)))
cache = CacheTable([keys, values])  # once; all layers of a model go in one table

# A draft: tokens and parents of each request, its newest token first.
shapes = [-1, 0, 0, 1, 1, 2, 5], [-1, 0, 1, 2]
draft = Draft.trees([0, 1], [(torch.randint(VOCAB, (len(own),)), own) for own in shapes], device=device)
plan = draft.get_plan()

# Scoring: where the nodes go, their keys and values, attention over the committed prefix and each node's ancestors.
table, committed, slots, _ = kv_slots(page_table, lengths, rows, draft.offsets, plan.depth, draft.num_nodes, PAGE)
embedding, project = torch.randn(VOCAB, HEADS * WIDTH, device=device), torch.randn(HEADS * WIDTH, VOCAB, device=device)
query = embedding[draft.tokens].view(-1, HEADS, WIDTH)
kv_stage(query[:, :KV_HEADS] * 0.5, query[:, KV_HEADS : 2 * KV_HEADS] * 0.5, keys, values, slots)
attention = (query, keys, values, table, committed, draft.offsets)
hidden = tree_attention(*attention, plan.ancestors, plan.depth, scale=WIDTH**-0.5)
logits = hidden.flatten(1) @ project * 0.1

# Verification under the requests' seeds, in one call; after the first one, one draft token of each tree is correct.
sampling = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seeds": [1234, 99], "positions": lengths.clone()}
draft.tokens[[1, 8]] = verify_trees(logits, draft, **sampling).next_token
found = verify_trees(logits, draft, **sampling)

# Commit: accepted nodes slide to the front in all layers in one launch, and lengths grow. Other nodes are dropped.
kv_commit(cache, table, committed, found.path, draft.offsets, found.num_accepted, rows, lengths)

print(explain("tree_attention", *attention, scale=1.0))
for row in range(2):
    kept = found.path[row, : int(found.num_accepted[row]) + 1].tolist()
    print(f"request {row}: path {kept}, next token {int(found.next_token[row])}, {int(lengths[row])} tokens committed")
