"""Speculative decoding without the engine: the parts, in a serving loop of your own.

The loop owns what an engine owns. It merges two sources into one tree by hand, the guess of a drafter and
what followed the newest token earlier in the text, and verifies twice: by a rule, and by its operators.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_fast import (
    Acceptance,
    Budget,
    Draft,
    HuggingFaceTarget,
    Rng,
    SamplingParams,
    TokenDistributions,
    get_drafter,
    get_rule,
)
from specdec_fast.engine.state import DecodeState
from specdec_fast.loading import load_model, load_tokenizer
from specdec_fast.sampling.target_distributions import target_distributions
from specdec_kernels import TreePlan, exact_match_verify, replay_sample, tree_plan

PROMPT = "1:1 And the sons of Adam were seven; and the sons of Noah were three; and the sons of"
NEW_TOKENS, DEPTH, CONTEXT = 48, 4, 512


def looked_up(tokens: Sequence[int]) -> list[int]:
    """What followed the newest token when it was last seen."""
    places = [at + 1 for at in range(len(tokens) - 1) if tokens[at] == tokens[-1]]
    return list(tokens[places[-1] : places[-1] + DEPTH]) if places else []


def merged(root: int, guesses: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """One tree (tokens, parents) of several chains: they share nodes as long as they agree."""
    tokens, parents = [root], [-1]
    for guess in guesses:
        parent = 0
        for token in guess:
            same = [node for node in range(1, len(tokens)) if (parents[node], tokens[node]) == (parent, token)]
            if not same:
                same = [len(tokens)]
                tokens.append(token)
                parents.append(parent)
            parent = same[0]
    return tokens, parents


@torch.inference_mode()
def main() -> None:
    tokenizer = load_tokenizer("demo-target")
    target = HuggingFaceTarget(load_model("demo-target"), max_rows=1, max_length=CONTEXT)
    model = HuggingFaceTarget(load_model("demo-draft"), max_rows=1, max_length=CONTEXT)
    drafter = get_drafter("draft_model")(model, num_draft_tokens=DEPTH)
    rule = get_rule("replay")

    # One request in row 0: the state owns its tokens, the target's cache its keys and values.
    prompt = tokenizer.encode(PROMPT)
    state = DecodeState(max_rows=1, max_length=CONTEXT)
    params = SamplingParams(temperature=0.5, seed=11)
    row = state.join(prompt, params, prompt_length=len(prompt), stop_ids=())
    target.cache.reserve(row, len(prompt))
    before_root = torch.tensor(prompt[:-1])  # the newest token is the root of the first tree
    ends = torch.tensor([0, len(before_root)], dtype=torch.int32)
    target.extend(torch.tensor([row], dtype=torch.int32), before_root, ends, logits=False)
    drafter.begin(state, [row], None)

    steps = 0
    while state.length(row) < len(prompt) + NEW_TOKENS:
        rng = state.rng([row])
        history = state.tokens(row)
        guess = drafter.propose(state, [row], Budget([DEPTH]), rng).tokens.tolist()[1:]
        draft = Draft.trees([row], [merged(history[-1], [guess, looked_up(history)])])

        plan = tree_plan(draft.parents, draft.offsets)
        target.cache.reserve(row, state.length(row) + draft.num_nodes)
        output, slots = target.score(draft, plan)  # all nodes in one forward pass
        dists = target_distributions(draft, plan, output.logits, state.sampling([row]), rng.positions)
        acceptance = rule(draft, plan, dists, rng)
        check_with_operators(draft, plan, dists, rng, acceptance)

        target.cache.commit(draft.rows, slots, acceptance.path, acceptance.num_accepted)
        [(emitted, num_accepted)] = state.read_emitted_tokens(draft, acceptance)
        state.append([row], [emitted])
        drafter.observe(state, draft, acceptance, output)
        steps += 1
        tried = f"{len(draft.tokens) - 1} nodes tried, {num_accepted} accepted"
        print(f"step {steps:2}: {tried}, then {tokenizer.decode(emitted[-1:])!r}")
    drafter.release([row])

    new = state.tokens(row)[len(prompt) :]
    print(f"\n{PROMPT}{tokenizer.decode(new)}")
    print(f"\n{len(new)} tokens, {len(new) / steps:.2f} tokens per target pass")


def check_with_operators(
    draft: Draft, plan: TreePlan, dists: TokenDistributions, rng: Rng, acceptance: Acceptance
) -> None:
    """Repeats the rule with operators: the target's choice at every node, and the path of the tree that matches it."""
    seeds = rng.seeds[draft.row_of]
    positions = rng.positions[draft.row_of] + plan.depth + 1
    choice = replay_sample(dists.logits, dists.inv_t, dists.cut, dists.tie_id, seeds, positions)
    links = plan.first_child, plan.next_sibling
    path, num_accepted, next_token = exact_match_verify(
        draft.tokens, draft.offsets, *links, choice, None, max_depth=draft.max_depth
    )
    assert torch.equal(path, acceptance.path)
    assert torch.equal(num_accepted, acceptance.num_accepted)
    assert torch.equal(next_token, acceptance.next_token)


if __name__ == "__main__":
    main()
