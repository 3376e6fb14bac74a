"""One decoding step of a serving stack that brings its own model and cache, with the operators on plain tensors.

Two requests, trees of 7 and 4 nodes, one attention layer with random weights in place of a model. Run it anywhere:

    python examples/embed_ops.py            # on a GPU if there is one
"""

from __future__ import annotations

import torch

from specdec_kernels import (
    CacheTable,
    distribution_stats,
    exact_match_verify,
    explain,
    kv_commit,
    kv_slots,
    kv_stage,
    replay_sample,
    tree_attention,
    tree_plan,
)

HEADS, KV_HEADS, WIDTH, VOCAB, PAGE = 8, 2, 64, 1000, 16
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


# The stack owns a paged cache (any strides), a page table, and how much of every request is committed.
keys, values = (torch.randn(32, PAGE, KV_HEADS, WIDTH, device=device) for _ in range(2))
page_table = ints(*range(1, 17)).view(2, 8)
lengths = ints(40, 21)
cache = CacheTable([keys, values])  # once; all layers of a model go in one table

# A draft: the nodes of all requests on one axis, node 0 of each its newest token, parents before children.
parents = ints(-1, 0, 0, 1, 1, 2, 5, -1, 0, 1, 2)
offsets = ints(0, 7, 11)
tokens = torch.randint(VOCAB, (11,), device=device)
plan = tree_plan(parents, offsets, max_nodes=7)

# Scoring: where the nodes go, their keys and values, attention over the committed prefix and each node's ancestors.
table, committed, slots, positions = kv_slots(page_table, lengths, ints(0, 1), offsets, plan.depth, 11, PAGE)
embedding, project = torch.randn(VOCAB, HEADS * WIDTH, device=device), torch.randn(HEADS * WIDTH, VOCAB, device=device)
query = embedding[tokens].view(11, HEADS, WIDTH)
key, value = query[:, :KV_HEADS] * 0.5, query[:, KV_HEADS : 2 * KV_HEADS] * 0.5
kv_stage(key, value, keys, values, slots)
hidden = tree_attention(
    query, keys, values, table, committed, offsets, plan.ancestors, plan.depth, scale=WIDTH**-0.5
)  # fmt: skip
logits = hidden.flatten(1) @ project * 0.1

# Verification under the requests' seeds: the target's choice at every node, and the path that matches it.
rows = torch.full((11,), 0.8, device=device), ints(*[50] * 11), torch.full((11,), 0.95, device=device)
inv_t, lse, cut, tie_id = distribution_stats(logits, *rows, torch.zeros(11, device=device))
seeds = torch.tensor([1234, 99], device=device)[plan.row.long()]
choice = replay_sample(logits, inv_t, cut, tie_id, seeds, (positions + 1).int())
tokens[1], tokens[8] = choice[0], choice[7]  # one correct draft token in each tree
path, accepted, following = exact_match_verify(
    tokens, offsets, plan.first_child, plan.next_sibling, choice, max_depth=6
)  # fmt: skip

# Commit: accepted nodes slide to the front in all layers in one launch, and lengths grow. Other nodes are dropped.
kv_commit(cache, table, committed, path, offsets, accepted, ints(0, 1), lengths)

print(explain("tree_attention", query, keys, values, table, committed, offsets, scale=1.0))
for row in range(2):
    kept = path[row, : int(accepted[row]) + 1].tolist()
    print(f"request {row}: path {kept}, next token {int(following[row])}, {int(lengths[row])} tokens committed")
