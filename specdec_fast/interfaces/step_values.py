"""Values that cross the interfaces in every step: acceptance, randomness, target outputs, slots, needs and budgets.

Treat them as immutable. Those that every step creates are not frozen, because freezing costs microseconds per object.
Tests: tests/test_interfaces.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from specdec_fast.sampling.sampling_tensors import SamplingTensors


@dataclass(slots=True, eq=False)
class Acceptance:
    """The result of a verification rule.

    Attributes:
        path: Accepted nodes on the packed axis, root first and padded with -1, int32 [B, D + 1].
        num_accepted: Accepted draft tokens of each request, root not counted, int32 [B].
        next_token: The recovered token after a rejection, the bonus token otherwise, int64 [B].
        node_choice: The target's own choice at every node, int64 [M]. Rules `replay` and `greedy` set it, also for
            score-only nodes; other rules leave it None.
        num_accepted_host: `num_accepted` as host integers, once the engine has read it, else None. If a distribution on
            the path is invalid, only the tokens before it are counted.
    """

    path: Tensor
    num_accepted: Tensor
    next_token: Tensor
    node_choice: Tensor | None = None
    num_accepted_host: tuple[int, ...] | None = None

    def read_num_accepted(self) -> Sequence[int]:
        """Returns the accepted draft tokens of each request as host integers.

        Reads the device only if the engine has not done so.
        """
        return self.num_accepted.tolist() if self.num_accepted_host is None else self.num_accepted_host

    def read_node_choice(self, output: TargetOutput) -> list[int]:
        """Returns the target's own choice at every node as host integers: the rule's, or else the likeliest token."""
        choice = self.node_choice
        if choice is None:
            assert output.logits is not None
            choice = output.logits.argmax(1)
        found: list[int] = choice.tolist()
        return found


@dataclass(slots=True, eq=False)
class Rng:
    """The keys of a step's random numbers.

    Random numbers are a function of seed, position, index and stream (`specdec_kernels.random`), so no generator has a
    state.

    Attributes:
        seeds: Seed of each request, int64 [B].
        positions: Absolute position of each root, int32 [B].
        first_draw: Number of the first draw that the drafter may make in this step. Draws of equal numbers read the
            same noise, so drafters that share a step start at different numbers.
    """

    seeds: Tensor
    positions: Tensor
    first_draw: int = 0

    def replay_noise_keys(self, sampling: SamplingTensors, pick: str) -> list[tuple[int, int] | None]:
        """Returns the keys of the replay noise, for drafters that sample on the host.

        Args:
            sampling: Sampling parameters of the B requests.
            pick: The drafter's option `pick`. Only "coupled" uses the noise of rule `replay`.

        Returns:
            Per request its seed and the position of its root. None for other values of `pick`, and for requests at
            temperature 0.
        """
        if pick != "coupled" or sampling.all_greedy:
            return [None] * self.seeds.shape[0]
        keys = zip(self.seeds.tolist(), self.positions.tolist(), sampling.temperature.tolist())
        return [(seed, position) if temperature else None for seed, position, temperature in keys]


@dataclass(slots=True, eq=False)
class TargetOutput:
    """The output of one target pass.

    Attributes:
        logits: Logits of the N nodes that the caller requested, any float dtype, [N, V]; None if it requested none.
        aux_hidden_states: Hidden states of all M nodes by name, [M, hidden] each.
        num_shared: After a prefill: the number of first tokens of each row that have no states here, because their keys
            and values were shared with an earlier request. Empty if all tokens have states.
    """

    logits: Tensor | None
    aux_hidden_states: dict[str, Tensor] = field(default_factory=dict)
    num_shared: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Slots:
    """The places of staged nodes in the cache: everything that attention needs in one pass.

    Attributes:
        page_table: Pages of each request in order, int32 [B, P].
        lengths: Committed tokens of each request, int32 [B].
        offsets: First node of each request on the packed axis, int32 [B + 1].
        slots: Flat slot of each node, `page * page_size + offset in the page`, int64 [M].
        positions: Position of each node in its text, int64 [M].
        ancestors: Bit mask of the ancestors of each node, int32 [M, W]; None for causal chains.
        depth: Depth of each node below its root, int32 [M]; None for causal chains.
    """

    page_table: Tensor
    lengths: Tensor
    offsets: Tensor
    slots: Tensor
    positions: Tensor
    ancestors: Tensor | None = None
    depth: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter requires from the engine, and what rules must know about its drafts.

    The engine compares capabilities. It never looks at the class of a drafter.

    Attributes:
        topology: Shape of the drafts.
        aux_hidden_states: Hidden states that the target returns for prompts and in every step: "entering:i" (input of
            layer i; with i the number of layers, the output of the last one) or "final_norm".
        prompt_aux_hidden_states: Hidden states that the target returns for prompts only. They do not change the steps.
        all_prompt_states: The drafter needs the hidden states of all prompt tokens. Otherwise it does without those of
            tokens whose keys and values are shared with an earlier request (`TargetOutput.num_shared`). Only drafters
            whose drafts may depend on other requests anyway (`cross_request`) can do without.
        host_tokens: The drafter reads committed tokens on the host. This requires `step_mode="sync"`.
        own_cache: The drafter keeps keys and values of its own.
        partial_layers: The drafter runs some layers of the target over the target's cache.
        node_choices: The drafter reads `Acceptance.node_choice` when it observes a step.
        logits: The drafter reads the target's logits when it observes a step.
        dists: Draft tokens are sampled, and their distributions accompany the draft.
        partial_dists: These distributions cover a part of the vocabulary.
        excludes_siblings: Tokens are sampled without the deterministic siblings of their node. No other drafter may add
            siblings.
        cross_request: Drafts of one request may depend on the texts or the acceptance of others. Rules that use fresh
            uniforms then key them by the request too.
        follows_clock: Drafts depend on measured times. Processes that compute one model together cannot use them.
        vocab_size: Upper bound of the token ids of the drafter's own model. None if the drafter uses the target's
            vocabulary.
    """

    topology: Literal["chain", "tree"] = "chain"
    aux_hidden_states: tuple[str, ...] = ()
    prompt_aux_hidden_states: tuple[str, ...] = ()
    all_prompt_states: bool = True
    host_tokens: bool = False
    own_cache: bool = False
    partial_layers: bool = False
    node_choices: bool = False
    logits: bool = False
    dists: bool = False
    partial_dists: bool = False
    excludes_siblings: bool = False
    cross_request: bool = False
    follows_clock: bool = False
    vocab_size: int | None = None


@dataclass(slots=True)
class Budget:
    """The draft nodes that each request may propose in a step.

    The engine sets it from committed data alone, before the drafter samples anything.

    Attributes:
        nodes: Draft nodes of each request, root not counted: B host integers.
    """

    nodes: Sequence[int]
