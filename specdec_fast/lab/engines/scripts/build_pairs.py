"""Builds pairs of tiny models that engines load from folders, with the target's logits after every short prefix.

Runs in the interpreter of the engine under test: `python build_pairs.py FOLDER PAIR ...`. It needs torch, transformers
and numpy, and nothing of this project. Tests: tests/lab/engines/test_recording.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCAB = 16
PROMPT = (3, 7, 1, 9, 3, 7, 1, 9, 3)
"""Prompt of the draws. It repeats itself, so that drafters that look up text find something."""
GREEDY_PROMPTS = tuple((*PROMPT[: 3 + at], (5 * at + 2) % VOCAB) for at in range(8))
"""Prompts of the greedy texts and of the texts that are compared alone and in a batch."""
GREEDY_TOKENS = 24
TARGET_TOKENS, DRAFT_TOKENS = "?bcdefghijklmnop", "lkjihgfedcb?#"
"""Characters of the two tokenizers, one per token. Drafts of the pair `universal` use the second one."""
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**(_SHAPE | more), num_hidden_layers=2, tie_word_embeddings=False))


def _gemma4_settings(shared_layers: int) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "gemma4_text",
        **_SHAPE,
        global_head_dim=32,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        sliding_window=64,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=shared_layers,
    )


def _draw_weights(model: Any, std: float = 0.3) -> Any:
    """Matrices of large noise, so that tokens depend on the whole prefix. Embeddings set the spread of logits."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15 if "lm_head" in name or "embed_tokens" in name else std)
    return model.eval()


def _disturbed(model: Any, share: float) -> Any:
    """A copy of a model with noise on its matrices, so that its drafts are accepted sometimes."""
    import copy

    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * share)
    return other


def _llama_pair() -> tuple[Any, Any]:
    target = _draw_weights(_llama())
    return target, _disturbed(target, 0.3)


def _universal_pair() -> tuple[Any, Any]:
    return _draw_weights(_llama()), _draw_weights(_llama(vocab_size=len(DRAFT_TOKENS)))


def _dflash_pair() -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModel

    target = _draw_weights(_llama())
    settings = {name: value for name, value in _SHAPE.items() if name != "vocab_size"} | {
        "num_hidden_layers": 1,
        "sliding_window": 64,
        "block_size": 4,
        "mask_token_id": VOCAB - 1,
        "target_layer_ids": [0, 1],
    }
    return target, AutoModel.from_config(AutoConfig.for_model("muse_glimmer_assistant", **settings)).eval()


def _gemma4_pair() -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    target = _draw_weights(AutoModelForCausalLM.from_config(_gemma4_settings(0)))
    width = _SHAPE["hidden_size"]
    settings = AutoConfig.for_model("gemma4_assistant", text_config=_gemma4_settings(2), backbone_hidden_size=width)
    assistant = _draw_weights(AutoModelForCausalLM.from_config(settings))
    with torch.no_grad():  # embeddings are also the projection: small ones, and more spread by the last norm
        for model in (target, assistant):
            model.get_input_embeddings().weight.mul_(0.3)
            model.get_decoder().norm.weight.mul_(4)
    assistant.generation_config.num_assistant_tokens = 3
    return target, assistant


def _tokenizer(tokens: str) -> Any:
    """A tokenizer with one token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({token: at for at, token in enumerate(tokens)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


PAIRS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "llama": _llama_pair,
    "universal": _universal_pair,
    "dflash": _dflash_pair,
    "gemma4": _gemma4_pair,
}
"""Name -> (target, draft model)."""


@torch.no_grad()
def _prefix_logits(target: Any) -> np.ndarray:
    """Logits after the prompt, after each token and after each two tokens, float32 [1 + V + V * V, V]."""
    one = [(a,) for a in range(VOCAB)]
    prefixes: list[list[tuple[int, ...]]] = [[()], [*one], [(*a, *b) for a in one for b in one]]
    rows = [target(torch.tensor([[*PROMPT, *more] for more in each])).logits[:, -1] for each in prefixes]
    return np.asarray(torch.cat(rows).float().numpy())


@torch.no_grad()
def _greedy_texts(target: Any) -> list[list[int]]:
    """The most probable token, again and again, computed without a cache."""
    texts = []
    for prompt in GREEDY_PROMPTS:
        text = list(prompt)
        for _ in range(GREEDY_TOKENS):
            text.append(int(target(torch.tensor([text])).logits[0, -1].argmax()))
        texts.append(text[len(prompt) :])
    return texts


def build(folder: Path, name: str) -> None:
    """Writes `folder/target`, `folder/draft`, `folder/logits.npy` and `folder/texts.json`."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    target, draft = PAIRS[name]()
    folder.mkdir(parents=True, exist_ok=True)
    for kind, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / kind)
        own = kind == "draft" and name == "universal"
        _tokenizer(DRAFT_TOKENS if own else TARGET_TOKENS).save_pretrained(folder / kind)
    np.save(folder / "logits.npy", _prefix_logits(target))
    texts = {"prompt": PROMPT, "prompts": GREEDY_PROMPTS, "greedy": _greedy_texts(target)}
    (folder / "texts.json").write_text(json.dumps(texts))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for pair in sys.argv[2:]:
        build(Path(sys.argv[1]) / pair, pair)
