"""Interface of drafters that take part in CUDA-graph steps.

A drafter offers it by a method `cuda_graph_proposals(max_rows)`. The method returns a `CudaGraphProposals`, or one
sentence that says why the drafter has none. Tests: tests/engine/cuda_graph/test_step_program.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from specdec_fast.interfaces.drafter import StateView
from specdec_fast.interfaces.step_values import Acceptance, TargetOutput
from specdec_fast.sampling.sampling_tensors import SamplingTensors


@dataclass(frozen=True, slots=True)
class CudaGraphRows:
    """The batch of a CUDA-graph step. All tensors are on the device.

    Attributes:
        rows: Row of each place in the batch, all different, int32 [B].
        lengths: Committed tokens, int32 [B].
        drafts: Draft nodes that each row requests, 0 to `num_draft_tokens`, int32 [B]. Rows that do not draft have 0.
        tokens: Committed tokens of all rows of the decode state, int64 [R, L].
        sampling: Sampling parameters of the B rows.
        num_draft_tokens: K, the most draft nodes of a row: a host integer, fixed when the step is captured.
    """

    rows: Tensor
    lengths: Tensor
    drafts: Tensor
    tokens: Tensor
    sampling: SamplingTensors
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class CudaGraphTrees:
    """Deterministic draft nodes below the roots, padded to K per row.

    Attributes:
        tokens: Draft tokens, int64 [B, K].
        parents: Parent of each node by its index in the tree, where 0 is the root, int32 [B, K]. Parents precede their
            children. None for chains.
        counts: Nodes that each row uses, the first ones, at most its `CudaGraphRows.drafts`, int32 [B].
        depth: Upper bound of the depth of any node: a host integer.
    """

    tokens: Tensor
    parents: Tensor | None
    counts: Tensor
    depth: int


@runtime_checkable
class CudaGraphProposals(Protocol):
    """Proposals as a part of a CUDA-graph step.

    `propose` and `observe` run while the step is captured: they must not read from the device, and no shape may depend
    on data. The other methods run on the host, between steps.

    Attributes:
        aux_hidden_states: Hidden states that `observe` needs from the target, as in `Needs.aux_hidden_states`.
    """

    aux_hidden_states: tuple[str, ...]

    def enter(self, view: StateView, rows: Sequence[int]) -> None:
        """Adds rows with their committed tokens. The engine calls it again for a row after it raised."""
        ...

    def reserve(self, row: int, length: int) -> bool:
        """Reserves memory for the first `length` tokens of a row; False if there is too little."""
        ...

    def propose(self, batch: CudaGraphRows) -> CudaGraphTrees:
        """Proposes deterministic trees for a batch, on the device."""
        ...

    def observe(self, batch: CudaGraphRows, acceptance: Acceptance, output: TargetOutput) -> None:
        """Observes the result of a step, on the device.

        Args:
            batch: The batch that `propose` received. Its `lengths` are those before the step; its `tokens` already
                include the tokens of the step.
            acceptance: What the rule accepted. Rows without nodes have a path of -1.
            output: Logits [M, V] and hidden states [M, hidden] of all nodes.
        """
        ...

    def leave(self, view: StateView, rows: Sequence[int]) -> None:
        """Returns rows to `sync` steps. `view` has what counts: the last step may have failed half-way."""
        ...
