"""`specdec train eagle | eagle3`: the command lines of heads that run once per drafted level.

Tests: tests/train/heads/test_eagle_command.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec_fast.train.heads.options import Text, Training, spelled_out
from specdec_fast.train.heads.parallel_command import train_heads

_HEAD, _LOSS = "Head", "Loss"


@dataclass(frozen=True, slots=True)
class Layer:
    """The one layer of a head; None: as the target has it."""

    attention_heads: Annotated[
        int | None, typer.Option(help="Of its layer (default: the target's).", rich_help_panel=_HEAD)
    ] = None
    kv_heads: Annotated[
        int | None, typer.Option(help="Of its layer (default: the target's).", rich_help_panel=_HEAD)
    ] = None
    inner: Annotated[
        int | None, typer.Option(help="Width of its MLP (default: the target's).", rich_help_panel=_HEAD)
    ] = None

    def changes(self) -> dict[str, int]:
        """What differs from the target's own layers. Raises ValueError."""
        asked = {
            "num_attention_heads": self.attention_heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.inner,
        }
        if any(value is not None and value < 1 for value in asked.values()):
            got = ", ".join(str(value) for value in asked.values())
            raise ValueError(f"--attention-heads, --kv-heads, --inner: got {got}; expected at least 1 of each")
        return {name: value for name, value in asked.items() if value is not None}


@spelled_out(out=Path("eagle-head"), batch=4, length=2048, lr=3e-5, warm_up=2000 / 800_000)
def eagle(
    text: Text,
    layer: Layer,
    *,
    bias: Annotated[bool, typer.Option(help="Whether the first projection has one.", rich_help_panel=_HEAD)] = True,
    embedding: Annotated[
        bool, typer.Option(help="Write the target's embedding into the result, as published.", rich_help_panel=_HEAD)
    ] = True,
    token_weight: Annotated[
        float, typer.Option(help="Of the tokens beside the features.", rich_help_panel=_LOSS)
    ] = 0.1,
    noise: Annotated[
        float, typer.Option(help="On the features that are read, for 512 tokens.", rich_help_panel=_LOSS)
    ] = 0.1,
    training: Training,
) -> None:
    """Train an EAGLE-1 and EAGLE-2 head for a model that stays as it is. Use: `--drafter eagle -o head=OUT/head`.

    Losses, rates and batch are the published ones. `accelerate launch -m specdec_fast.cli train eagle ...` takes
    several GPUs or machines.
    """
    from specdec_fast.heads.checkpoint_eagle import save_eagle
    from specdec_fast.train.heads.recurrent import FINAL, EagleTrainee, new_eagle
    from specdec_fast.train.heads.target_states import TargetStates

    def build(target: Any, _row: Any) -> EagleTrainee:
        head = new_eagle(target, bias=bias, **layer.changes())
        return EagleTrainee(head, TargetStates(target, (FINAL,)), token_weight=token_weight, noise=noise)

    def save(trainee: EagleTrainee, _held: Any, place: Path, facts: dict[str, Any]) -> None:
        own = trainee.states.model.get_input_embeddings().weight if embedding else None
        save_eagle(place, _halved(trainee.head), {**facts, "base_model_name_or_path": text.model}, embedding=own)

    train_heads(
        "eagle", text, training, build, save, {"token_weight": token_weight, "noise": noise}, betas=(0.9, 0.95),
        weight_decay=0.01, clip=0.5, clip_values=True, schedule="linear",
    )  # fmt: skip


@spelled_out(out=Path("eagle3-head"), batch=2, length=2048, lr=5e-5, warm_up=12_000 / 800_000)
def eagle3(
    text: Text,
    layer: Layer,
    *,
    layers: Annotated[
        str | None,
        typer.Option(help="Layers whose inputs it reads, as in 2,6,9 (default: as published).", rich_help_panel=_HEAD),
    ] = None,
    vocab: Annotated[
        int, typer.Option(help="Tokens that it can draft: the most frequent of the text.", rich_help_panel=_HEAD)
    ] = 32_000,
    ahead: Annotated[int, typer.Option(help="Unrolled steps of the training-time test.", rich_help_panel=_LOSS)] = 7,
    decay: Annotated[float, typer.Option(help="Weight of a step beside the one before.", rich_help_panel=_LOSS)] = 0.8,
    training: Training,
) -> None:
    """Train an EAGLE-3 head for a model that stays as it is. Use it with `--drafter eagle3 -o head=OUT/head`.

    Loss, rates and unrolled steps are the published ones. `accelerate launch -m specdec_fast.cli train eagle3 ...`
    takes several GPUs or machines.
    """
    from specdec_fast.heads.checkpoint_eagle import save_eagle3
    from specdec_fast.train.heads.recurrent import FINAL, Eagle3Trainee, frequent_ids, new_eagle3
    from specdec_fast.train.heads.target_states import TargetStates

    if layers is not None and not layers.replace(",", "").replace(" ", "").isdigit():
        raise ValueError(f"--layers: got {layers!r}; expected numbers with commas between them, as in 2,6,9")
    read = None if layers is None else [int(each) for each in layers.split(",") if each.strip()]
    if vocab < 1:
        raise ValueError(f"--vocab: got {vocab}; expected at least 1")

    def build(target: Any, row: Any) -> Eagle3Trainee:
        rows = target.get_input_embeddings().weight.shape[0]
        ids = frequent_ids(row, min(vocab, rows), rows)
        head = new_eagle3(target, ids, read, **layer.changes())
        states = TargetStates(target, tuple(dict.fromkeys((*head.aux_hidden_states, FINAL))))
        return Eagle3Trainee(head, states, decay=decay, ahead=ahead)

    def save(trainee: Eagle3Trainee, _held: Any, place: Path, facts: dict[str, Any]) -> None:
        save_eagle3(place, _halved(trainee.head), {**facts, "base_model_name_or_path": text.model})

    train_heads(
        "eagle3", text, training, build, save, {"ahead": ahead, "decay": decay}, betas=(0.9, 0.95), clip=0.5,
        schedule="linear",
    )  # fmt: skip


def _halved(head: Any) -> Any:
    """The head as it is published, in bfloat16; the one that is trained stays as it is."""
    import copy

    import torch

    return copy.deepcopy(head).to(torch.bfloat16)
