"""The four interfaces of the engine: target, key/value cache, drafter and rule. Start here to embed specdec-fast.

| interface | module | implement it to |
| --- | --- | --- |
| `Target`, `KVCache` | `target.py` | score token trees with a model of your own |
| `Drafter` | `drafter.py` | propose tokens in a new way |
| `Rule` | `rule.py` | decide in a new way which draft tokens to accept |
| `CudaGraphProposals` | `cuda_graph.py` | let a drafter take part in CUDA-graph steps |

They are protocols: a class that has the methods needs no base class. The values that cross them are in
`step_values.py`, `specdec_fast.core.draft` and `specdec_fast.core.distributions`.

Shapes use these letters: B requests of a step, M packed nodes of their trees (roots included), V tokens of the
vocabulary, D the deepest draft. A *row* is the place of a request in the decode state and in the cache. Rows join and
leave between any two steps.

Tests: tests/test_interfaces.py.
"""

from specdec_fast.interfaces.cuda_graph import CudaGraphProposals, CudaGraphRows, CudaGraphTrees
from specdec_fast.interfaces.drafter import Drafter, DrafterParts, StateView
from specdec_fast.interfaces.rule import Rule, ThresholdRule, has_thresholds
from specdec_fast.interfaces.step_values import Acceptance, Budget, Needs, Rng, Slots, TargetOutput
from specdec_fast.interfaces.target import KVCache, Target

__all__ = [
    "Acceptance",
    "Budget",
    "CudaGraphProposals",
    "CudaGraphRows",
    "CudaGraphTrees",
    "Drafter",
    "DrafterParts",
    "KVCache",
    "Needs",
    "Rng",
    "Rule",
    "Slots",
    "StateView",
    "Target",
    "TargetOutput",
    "ThresholdRule",
    "has_thresholds",
]
