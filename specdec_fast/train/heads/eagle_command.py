"""`specdec train eagle | eagle3`: command lines of recurrent heads, which run once per draft level.

Tests: tests/train/heads/test_eagle_command.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec_fast.train.heads.options import TextOptions, TrainingOptions, expand_options
from specdec_fast.train.heads.parallel_command import HeldOutText, train_heads

_HEAD, _LOSS = "Head", "Loss"


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """Sizes of the head's only layer; None means the target's."""

    attention_heads: Annotated[
        int | None, typer.Option(help="Number of heads of the layer (default: the target's).", rich_help_panel=_HEAD)
    ] = None
    kv_heads: Annotated[
        int | None, typer.Option(help="Number of heads of the layer (default: the target's).", rich_help_panel=_HEAD)
    ] = None
    inner: Annotated[
        int | None, typer.Option(help="Width of the layer's MLP (default: the target's).", rich_help_panel=_HEAD)
    ] = None

    def changes(self) -> dict[str, int]:
        """Returns sizes that differ from the target's, under the names of its config.

        Raises:
            ValueError: If a size is below 1.
        """
        requested = {
            "num_attention_heads": self.attention_heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.inner,
        }
        if any(value is not None and value < 1 for value in requested.values()):
            got = ", ".join(str(value) for value in requested.values())
            raise ValueError(f"--attention-heads, --kv-heads, --inner: got {got}; expected at least 1 of each")
        return {name: value for name, value in requested.items() if value is not None}


@expand_options(out=Path("eagle-head"), batch=4, length=2048, lr=3e-5, warm_up=2000 / 800_000)
def eagle(
    text: TextOptions,
    layer: LayerOptions,
    *,
    bias: Annotated[bool, typer.Option(help="Whether the first projection has a bias.", rich_help_panel=_HEAD)] = True,
    embedding: Annotated[
        bool,
        typer.Option(help="Save the target's embedding with the head, as published heads do.", rich_help_panel=_HEAD),
    ] = True,
    token_weight: Annotated[
        float, typer.Option(help="Weight of the token loss relative to the feature loss.", rich_help_panel=_LOSS)
    ] = 0.1,
    noise: Annotated[
        float, typer.Option(help="Amplitude of the noise on input features, for 512 tokens.", rich_help_panel=_LOSS)
    ] = 0.1,
    training: TrainingOptions,
) -> None:
    """Train an EAGLE-1 or EAGLE-2 head for a frozen model. Use it with `--drafter eagle -o head=OUT/head`.

    Losses, learning rate and batch size are the published ones. For several GPUs or machines, run
    `accelerate launch -m specdec_fast.cli train eagle ...`.
    """
    from specdec_fast.heads.checkpoint_eagle import save_eagle
    from specdec_fast.train.heads.recurrent import FINAL, EagleTrainee, new_eagle
    from specdec_fast.train.heads.target_states import TargetStates

    def build(target: Any, _row: Any) -> EagleTrainee:
        head = new_eagle(target, bias=bias, **layer.changes())
        return EagleTrainee(head, TargetStates(target, (FINAL,)), token_weight=token_weight, noise=noise)

    def save(trainee: EagleTrainee, _held: HeldOutText, place: Path, facts: dict[str, Any]) -> None:
        own = trainee.states.model.get_input_embeddings().weight if embedding else None
        save_eagle(place, _to_bfloat16(trainee.head), {**facts, "base_model_name_or_path": text.model}, embedding=own)

    train_heads(
        "eagle", text, training, build, save, {"token_weight": token_weight, "noise": noise}, betas=(0.9, 0.95),
        weight_decay=0.01, clip=0.5, clip_values=True, schedule="linear",
    )  # fmt: skip


@expand_options(out=Path("eagle3-head"), batch=2, length=2048, lr=5e-5, warm_up=12_000 / 800_000)
def eagle3(
    text: TextOptions,
    layer: LayerOptions,
    *,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Layers whose inputs the head reads, such as 2,6,9 (default: as published).", rich_help_panel=_HEAD
        ),
    ] = None,
    vocab: Annotated[
        int,
        typer.Option(help="Size of the draft vocabulary: the most frequent tokens of the text.", rich_help_panel=_HEAD),
    ] = 32_000,
    ahead: Annotated[int, typer.Option(help="Unrolled steps of the training-time test.", rich_help_panel=_LOSS)] = 7,
    decay: Annotated[
        float, typer.Option(help="Weight of a step relative to the previous one.", rich_help_panel=_LOSS)
    ] = 0.8,
    training: TrainingOptions,
) -> None:
    """Train an EAGLE-3 head for a frozen model. Use it with `--drafter eagle3 -o head=OUT/head`.

    Loss, learning rate and unrolled steps are the published ones. For several GPUs or machines, run
    `accelerate launch -m specdec_fast.cli train eagle3 ...`.
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

    def save(trainee: Eagle3Trainee, _held: HeldOutText, place: Path, facts: dict[str, Any]) -> None:
        save_eagle3(place, _to_bfloat16(trainee.head), {**facts, "base_model_name_or_path": text.model})

    train_heads(
        "eagle3", text, training, build, save, {"ahead": ahead, "decay": decay}, betas=(0.9, 0.95), clip=0.5,
        schedule="linear",
    )  # fmt: skip


def _to_bfloat16(head: Any) -> Any:
    """Returns a bfloat16 copy, as heads are published; the trained head stays unchanged."""
    import copy

    import torch

    return copy.deepcopy(head).to(torch.bfloat16)
