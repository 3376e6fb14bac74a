"""A fake of the parts of SGLang 0.5.23 that the plugin touches: modules, a batch, and its tensors.

`tests/integrations/test_sglang_package.py` compares names and tensors with the package itself where it can be had.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_fast.embedding import links_from_parents

VERSION = "0.5.23"
ROOT = Path(__file__).parents[2]


def eagle_sample(
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    uno_target_max_top_k: Any = None,
    *,
    watermark_state: Any = None,
    watermark_full_mask: bool = True,
) -> Any:
    """SGLang's own function, with its parameters; it only says that it was called."""
    return "SGLang", logits_output.next_token_logits.clone()


def sanitize_nan_logits(logits: Tensor, msg: str = "") -> None:
    """SGLang's cleaning of logits, in place."""
    torch.nan_to_num_(logits, nan=-1e30, posinf=1e30, neginf=-1e30)


class Group:
    """A tensor-parallel group that records what is broadcast."""

    def __init__(self, world_size: int = 1) -> None:
        self.world_size, self.sent = world_size, []  # type: ignore[var-annotated]
        self.cpu_group: Any = None

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Records the call."""
        self.sent.append((tensor, src))


@dataclass
class FakePackage:
    """The modules, with what tests change."""

    hooks: dict[str, list[Any]] = field(default_factory=dict)
    settings: Any = None
    group: Group = field(default_factory=Group)
    modules: dict[str, ModuleType] = field(default_factory=dict)

    def apply(self) -> Callable[..., Any]:
        """Returns `eagle_sample` with its registered AROUND hooks, as SGLang would call it."""
        (hook,) = self.hooks["sglang.srt.speculative.eagle_utils.eagle_sample"]
        return lambda *args, **kwargs: hook(eagle_sample, *args, **kwargs)


def install(patch: pytest.MonkeyPatch, version: str = VERSION) -> FakePackage:
    """Puts the fake modules in place of the package."""
    made = FakePackage(
        settings=SimpleNamespace(
            speculative_accept_threshold_single=1.0,
            speculative_accept_threshold_acc=1.0,
            speculative_algorithm="EAGLE3",
        )
    )

    class HookRegistry:
        """Registers hooks."""

        _hooks = made.hooks

        @classmethod
        def register(cls, target: str, hook: Any, hook_type: str) -> None:
            """Records a hook."""
            assert hook_type == "around" and not isinstance(hook, type)
            cls._hooks.setdefault(target, []).append(hook)

    contents: dict[str, dict[str, Any]] = {
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": HookRegistry,
            "HookType": SimpleNamespace(AROUND="around"),
        },
        "sglang.srt.speculative.eagle_utils": {"eagle_sample": eagle_sample},
        "sglang.srt.speculative.spec_utils": {"SIMULATE_ACC_LEN": -1},
        "sglang.srt.runtime_context": {
            "get_spec": lambda: made.settings,
            "get_parallel": lambda: SimpleNamespace(tp_group=made.group, attn_tp_group=Group()),
        },
        "sglang.srt.layers.dp_attention": {"is_dp_attention_enabled": lambda: False},
        "sglang.srt.utils.async_probe": {
            "sanitize_nan_logits": lambda logits, msg="": torch.nan_to_num_(
                logits, nan=-1e30, posinf=1e30, neginf=-1e30
            )
        },
    }
    for name, values in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            if parent not in made.modules:
                made.modules[parent] = ModuleType(parent)
                patch.setitem(sys.modules, parent, made.modules[parent])
        vars(made.modules[name]).update(values)
    found = metadata.version
    patch.setattr(metadata, "version", lambda name: version if name == "sglang" else found(name))
    return made


def verify_input(parents: Tensor, tokens: Tensor, **changes: Any) -> Any:
    """SGLang's verify input of trees: parents and tokens [bs, D]."""
    links = links_from_parents(parents, unused=True)
    own = {
        "draft_token": tokens.flatten(),
        "retrieve_index": links.node_index,
        "retrieve_next_token": links.next_token,
        "retrieve_next_sibling": links.next_sibling,
        "draft_token_num": tokens.shape[1],
        "max_tree_depth": tokens.shape[1],
        "draft_probs": None,
    }
    return SimpleNamespace(**own | changes)


def batch(seq_lens: Sequence[int], rids: Sequence[str] | None = None, **changes: Any) -> Any:
    """SGLang's batch with sampling parameters at temperature 1; `changes` are those of its sampling information."""
    rows = len(seq_lens)
    info = {
        "temperatures": torch.ones(rows, 1),
        "top_ks": torch.full((rows,), 1 << 30, dtype=torch.int32),
        "top_ps": torch.ones(rows),
        "min_ps": torch.zeros(rows),
        "need_top_k_sampling": False,
        "need_top_p_sampling": False,
        "need_min_p_sampling": False,
        "sampling_seed": None,
        "acc_additive_penalties": None,
        "acc_scaling_penalties": None,
        "logit_bias": None,
        "has_watermark_candidates": False,
    }
    return SimpleNamespace(
        seq_lens=torch.tensor(seq_lens),
        reqs=[SimpleNamespace(rid=rid) for rid in rids or [f"request-{row}" for row in range(rows)]],
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        sampling_info=SimpleNamespace(**info | changes),
        device="cpu",
    )


def logits_output(logits: Tensor) -> Any:
    """SGLang's logits output, [bs * D, V]."""
    return SimpleNamespace(next_token_logits=logits)


def emitted(answer: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Tokens that SGLang emits for an answer, [bs, depth], padded with -1: `predict` at the accepted nodes."""
    predict, lengths, accept_index = answer
    places = torch.arange(accept_index.shape[1])
    return torch.where(places < lengths[:, None], predict[accept_index.long()], -1)
