"""Speculative decoding without the engine: for whoever has a serving loop and wants the parts.

The loop below owns everything an engine owns. Its drafts are made by hand: a tree of two guesses, both looked up in the
text so far. The verification is done twice, by a rule and by the operators under it, to show that a rule is no more
than a name for two operator calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from specdec_kernels import replay_sample, tree_plan, tree_verify

from specdec_fast import Draft, HuggingFaceTarget, SamplingParams, get_rule
from specdec_fast.loading import load_model, load_tokenizer
from specdec_fast.sampling import process
from specdec_fast.state import DecodeState

PROMPT = "1:1 And the sons of Adam were seven; the sons of Noah were three; the sons of"
NEW_TOKENS = 48


def two_guesses(tokens: Sequence[int], depth: int = 4) -> tuple[list[int], list[int]]:
    """A tree (tokens, parents): what followed the newest token the last two times, sharing what they share."""
    nodes, parents = [tokens[-1]], [-1]
    places = [at + 1 for at in range(len(tokens) - 1) if tokens[at] == tokens[-1]]
    for place in reversed(places[-2:]):
        parent = 0
        for token in tokens[place : place + depth]:
            children = [node for node in range(1, len(nodes)) if parents[node] == parent and nodes[node] == token]
            if not children:
                children = [len(nodes)]
                nodes.append(token)
                parents.append(parent)
            parent = children[0]
    return nodes, parents


@torch.inference_mode()
def main() -> None:
    tokenizer = load_tokenizer("demo-target")
    target = HuggingFaceTarget(load_model("demo-target"), max_rows=1, max_length=512)
    rule = get_rule("replay")
    params = SamplingParams(temperature=0.5, seed=11)

    # One request in row 0: the state owns its tokens, the target's cache owns keys and values.
    prompt = tokenizer.encode(PROMPT)
    state = DecodeState(max_rows=1, max_length=512)
    row = state.join(prompt, params, prompt_length=len(prompt), stop_ids=())
    rows = torch.tensor([row], dtype=torch.int32)
    target.cache.reserve(row, len(prompt))
    prefill = torch.tensor(prompt[:-1])
    target.extend(rows, prefill, torch.tensor([0, len(prefill)], dtype=torch.int32), logits=False)

    steps = 0
    while state.length(row) < len(prompt) + NEW_TOKENS:
        rng, sampling = state.rng([row]), state.sampling([row])

        draft = Draft.trees([row], [two_guesses(state.tokens(row))])  # propose
        plan = tree_plan(draft.parents, draft.offsets)
        target.cache.reserve(row, state.length(row) + draft.num_nodes)
        output, slots = target.score(draft, plan)  # every node in one forward pass
        laws = process(draft, plan, output.logits, sampling, rng.positions)
        acceptance = rule(draft, plan, laws, rng)  # verify
        target.cache.commit(draft.rows, slots, acceptance.path, acceptance.num_accepted)

        check_with_operators(draft, plan, laws, rng, acceptance)
        [(emitted, num_accepted)] = state.read(draft, acceptance)
        state.append([row], [emitted])
        steps += 1
        told = f"step {steps:2}: {draft.num_nodes - 1} drafted, {num_accepted} accepted"
        print(f"{told}: {tokenizer.decode(emitted)!r}")

    text = tokenizer.decode(state.tokens(row)[len(prompt) :])
    count = state.length(row) - len(prompt)
    print(f"\n{PROMPT}{text}\n\n{count} tokens, {count / steps:.2f} tokens per target pass")


def check_with_operators(draft, plan, laws, rng, acceptance) -> None:  # type: ignore[no-untyped-def]
    """The rule again, from its operators: what the target says at every node, and how far the draft has it."""
    seeds = rng.seeds[draft.row_of]
    positions = rng.positions[draft.row_of] + plan.depth + 1
    choice = replay_sample(laws.logits, laws.inv_t, laws.cut, laws.tie_id, seeds, positions)
    path, num_accepted, next_token = tree_verify(
        draft.tokens, draft.offsets, plan.first_child, plan.next_sibling, choice, None, draft.max_depth
    )
    assert torch.equal(path, acceptance.path)
    assert torch.equal(num_accepted, acceptance.num_accepted)
    assert torch.equal(next_token, acceptance.next_token)


if __name__ == "__main__":
    main()
