"""Known mistakes in verification, from defects of public systems, as exact distributions on small models.

`specdec_fast.lab.kill_matrix` measures how far a mutant's text distribution is from the target's, and how many draws
detect the difference. Tests: tests/lab/test_kill_matrix.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from specdec_fast.lab.mutant_states import (
    last_token_at_the_edge,
    ranks_draw_their_own_seeds,
    read_first_column_after_no_drafts,
    redraw_with_draft_noise,
    verify_with_another_slot,
)
from specdec_fast.lab.mutant_steps import (
    After,
    Chain,
    ModelPair,
    Step,
    accept_probability,
    accept_typical,
    accept_with_the_sampling_uniform,
    after_a_rejection,
    at_half_temperature,
    block_of_two,
    ignore_end_inside_step,
    likeliest,
    normalised,
    of_other_text,
    penalise_rejected,
    point_mass,
    positive_part,
    repeat_end_token,
    rounded_to_bfloat16,
    sample_per_path,
    top_k,
    two_sampled_siblings,
    use_dist_of_sibling,
    verify_duplicates_twice,
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A decoding step with one mistake.

    Attributes:
        name: Short name.
        mistake: The mistake, in one sentence.
        origin: The system, paper or issue in which the mistake was observed.
        step: The wrong step.
        truth: Returns the correct distribution after a text, from the models.
        noticed_by: The test that detects the mistake: the distribution of the first token, or only the joint
            distribution of several tokens.
    """

    name: str
    mistake: str
    origin: str
    step: Step
    truth: Callable[[ModelPair], After] = lambda models: models.p
    noticed_by: Literal["first token", "joint distribution"] = "first token"


CORRECT_RULES: dict[str, Step] = {
    "rejection": Chain(),
    "block": block_of_two(stop_at_failure=False, rejection_residual=False),
    "two independent siblings": two_sampled_siblings(update_residual=True, without_replacement=False),
}
"""The same steps without a mistake. They must pass every check that detects a mutant."""

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "arg-max draft, softmax q",
        "The draft token is the arg-max of q, but the test divides by its softmax probability.",
        "Draft & Verify; jaymody #3; transformers #47932; Gemma 4 assistant in transformers 5.24.0",
        Chain(draft_dist=lambda q: point_mass(likeliest(q)[0], len(q))),
    ),
    Mutant(
        "recovered token from p",
        "After a rejection, the next token is sampled from p instead of the residual.",
        "Medusa and REST, nucleus path",
        Chain(residual=lambda p, q, token: p),
    ),
    Mutant(
        "q recorded before top-k",
        "Draft tokens are sampled after top-k, but the test divides by q before top-k.",
        "transformers #47932",
        Chain(draft_dist=lambda q: top_k(q, 2)),
    ),
    Mutant(
        "bonus without temperature",
        "The bonus token is sampled at temperature 1, whatever the request's temperature is.",
        "EAGLE v1",
        Chain(target_dist=at_half_temperature, draft_dist=at_half_temperature, tested_dist=at_half_temperature),
        truth=lambda models: lambda text: at_half_temperature(models.p(text)),
        noticed_by="joint distribution",
    ),
    Mutant(
        "siblings without replacement, plain q",
        "Siblings are sampled without replacement, but tested against q with replacement.",
        "EAGLE #74",
        two_sampled_siblings(update_residual=True, without_replacement=True),
    ),
    Mutant(
        "residual not updated between siblings",
        "The second sibling is tested against p instead of the residual after the first rejection.",
        "multi-round rejection, common slip",
        two_sampled_siblings(update_residual=False, without_replacement=False),
    ),
    Mutant(
        "unlikely sampled token dropped",
        "A draft token is dropped after it was sampled, because its probability is low.",
        "confidence pruning, several systems",
        Chain(keeps=lambda q, token: q[token] >= 0.4),
    ),
    Mutant(
        "one uniform samples and tests",
        "The uniform that sampled the draft token also decides whether it is accepted.",
        "LLMSpeculativeSampling, random_seed",
        Chain(accept=accept_with_the_sampling_uniform),
    ),
    Mutant(
        "lenience 0.5",
        "The acceptance probability is doubled.",
        "Leviathan et al. A.5",
        Chain(accept=lambda p, q, token: min(1.0, 2 * accept_probability(p, q, token))),
    ),
    Mutant(
        "residual of q - p",
        "The residual is the positive part of q - p instead of p - q.",
        "sign slip",
        Chain(residual=lambda p, q, token: positive_part(q, p)),
    ),
    Mutant(
        "inverted comparison",
        "A token is accepted when it should be rejected, and rejected when it should be accepted.",
        "sign slip",
        Chain(accept=lambda p, q, token: 1 - accept_probability(p, q, token)),
    ),
    Mutant(
        "typical acceptance",
        "Typical tokens are always accepted.",
        "Medusa",
        Chain(
            draft_dist=lambda q: point_mass(likeliest(q)[0], len(q)),
            accept=accept_typical,
            residual=lambda p, q, token: p,
        ),
    ),
    Mutant(
        "arg-max acceptance at T > 0",
        "At a temperature above 0, a token is accepted only if it is the arg-max of p.",
        "greedy walk used for sampling",
        Chain(accept=lambda p, q, token: float(token == likeliest(p)[0]), residual=lambda p, q, token: p),
    ),
    Mutant(
        "padded vocabulary",
        "A padding entry of the target's output has a positive probability.",
        "target heads padded to a multiple of 64",
        Chain(
            target_dist=lambda p: normalised([*p, 0.05]),
            draft_dist=lambda q: [*q, 0.0],
            tested_dist=lambda q: [*q, 0.0],
        ),
    ),
    Mutant(
        "draft vocabulary off by one",
        "The test reads q at the neighbour of the draft token's id.",
        "EAGLE-3 tables: NeMo #2447",
        Chain(tested_dist=lambda q: [q[-1], *q[:-1]]),
    ),
    Mutant(
        "processors on the bonus token only",
        "Logits processors change the bonus token, but not the verified tokens.",
        "vLLM #42744",
        Chain(bonus_dist=lambda p: top_k(p, 2)),
        truth=lambda models: lambda text: top_k(models.p(text), 2),
    ),
    Mutant(
        "temperature on the draft only",
        "The draft uses the request's temperature, but the target uses temperature 1.",
        "SGLang on ROCm #39253",
        Chain(draft_dist=at_half_temperature, tested_dist=at_half_temperature),
        truth=lambda models: lambda text: at_half_temperature(models.p(text)),
    ),
    Mutant(
        "raw q, processed p",
        "The test divides by q without normalisation.",
        "DFlash in transformers #47932",
        Chain(tested_dist=lambda q: [1.5 * weight for weight in q]),
    ),
    Mutant(
        "q in bfloat16",
        "The test divides by q rounded to bfloat16.",
        "DeepSpec #31",
        Chain(tested_dist=rounded_to_bfloat16),
    ),
    Mutant(
        "uniform 0 accepts",
        "A uniform of exactly 0 accepts a token that has probability 0 under p.",
        "EAGLE, LLMSpeculativeSampling; sglang #35771",
        Chain(accept=lambda p, q, token: max(accept_probability(p, q, token), 2.0**-24)),
    ),
    Mutant(
        "stale keys and values",
        "The keys and values of a rejected token stay in the cache.",
        "cache not rolled back",
        of_other_text(lambda context, rejected, recovered: (*context, rejected)),
        noticed_by="joint distribution",
    ),
    Mutant(
        "rejected draft is penalised",
        "The repetition penalty also counts a rejected draft token.",
        "vmlx-swift #357",
        after_a_rejection(penalise_rejected),
        noticed_by="joint distribution",
    ),
    Mutant(
        "distribution of the wrong parent",
        "A node is verified with the target's distribution at its parent's sibling.",
        "tree mask or index slip",
        use_dist_of_sibling,
        noticed_by="joint distribution",
    ),
    Mutant(
        "every path samples for itself",
        "Paths sample separate tokens at a node that they share, and the first matching path wins.",
        "Medusa and REST, nucleus mask; fms-extras #12",
        sample_per_path,
    ),
    Mutant(
        "duplicate siblings",
        "A deterministic token that two sources propose is tested twice against the same distribution.",
        "unmerged sources",
        verify_duplicates_twice,
    ),
    Mutant(
        "end of sequence inside a block",
        "Tokens after an accepted end-of-sequence token are emitted until the step ends.",
        "transformers #47912",
        ignore_end_inside_step,
        truth=repeat_end_token,
        noticed_by="joint distribution",
    ),
    Mutant(
        "block rule stops at the first failure",
        "Block verification ends the path at the first failed uniform instead of after the last passed one.",
        "review of vllm-ascend #11985",
        block_of_two(stop_at_failure=True, rejection_residual=False),
    ),
    Mutant(
        "block rule with the rejection residual",
        "Block verification samples the recovered token from (p - q)+ instead of (w p - q)+.",
        "vllm-ascend #7807",
        block_of_two(stop_at_failure=False, rejection_residual=True),
        noticed_by="joint distribution",
    ),
    Mutant(
        "draft noise redraws the residual",
        "The Gumbel noise that drew the draft token also draws the recovered token.",
        "vLLM #47386, #54282",
        Chain(residual=redraw_with_draft_noise),
    ),
    Mutant(
        "state of rejected tokens stays",
        "After a rejection, the state holds the rejected token as well as the recovered one.",
        "transformers #49036, z-lab/dflash #172",
        of_other_text(lambda context, rejected, recovered: (*context, rejected, recovered)),
        noticed_by="joint distribution",
    ),
    Mutant(
        "state column 0 after a step without drafts",
        "The step after one without drafts reads the state before that step's token.",
        "vLLM #39273, #52942",
        read_first_column_after_no_drafts,
        noticed_by="joint distribution",
    ),
    Mutant(
        "rollback is applied again",
        "The rollback of a rejection is applied again in the next step, which removes the recovered token.",
        "llama-cpp-turboquant #352",
        of_other_text(lambda context, rejected, recovered: context),
        noticed_by="joint distribution",
    ),
    Mutant(
        "draft distribution of another slot",
        "The test divides by the draft distribution of another request of the batch.",
        "1Cat-vLLM #656",
        verify_with_another_slot,
    ),
    Mutant(
        "uniform 1 takes the last token",
        "A uniform of exactly 1 passes the end of the cumulative sum, and the last token is emitted.",
        "seeded draws of SGLang, since clamped",
        Chain(
            residual=lambda p, q, token: last_token_at_the_edge(positive_part(p, q)), bonus_dist=last_token_at_the_edge
        ),
    ),
    Mutant(
        "ranks draw their own seeds",
        "Tensor-parallel ranks draw seeds from their own generators, so each goes on with another token.",
        "local-inference-lab/vllm #98",
        ranks_draw_their_own_seeds,
        noticed_by="joint distribution",
    ),
)
"""Known mistakes. Every one is detected by a check of `specdec_fast.lab.kill_matrix.judge`."""
