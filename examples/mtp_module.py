"""Train a multi-token prediction module for a target without one, and draft chains with it.

Needs the extra `train`.
"""

import argparse
import tempfile
from pathlib import Path

from specdec_fast import HuggingFaceTarget, SamplingParams, load
from specdec_fast.heads.checkpoint_mtp import save_mtp
from specdec_fast.heads.mtp import build_mtp_head
from specdec_fast.loading import load_model, load_tokenizer
from specdec_fast.train.heads.recurrent import Eagle3Trainee
from specdec_fast.train.heads.settings import Settings
from specdec_fast.train.heads.target_states import TargetStates
from specdec_fast.train.heads.trainer import fit
from specdec_fast.train.heads.training_texts import read_token_row, split

TEXT = Path(argparse.__file__)  # any text that the target knows how to continue

with tempfile.TemporaryDirectory() as folder:
    model, place = load_model("demo-target"), Path(folder)
    states = TargetStates(model, ("final_norm",))
    head = build_mtp_head(HuggingFaceTarget(load_model("demo-target"), max_rows=1))  # a layer of the target's kind
    settings = Settings(steps=20, batch=2, length=64, lr=4e-3)
    row, held = split(read_token_row([TEXT], "text", load_tokenizer("demo-target")), settings.length, blocks=4)
    history = fit(Eagle3Trainee(head, states, ahead=2), states, row, held, settings, place).history
    save_mtp(place / "head", head, model.config.num_hidden_layers)  # targets that have one hold it themselves
    params = SamplingParams(temperature=0, max_new_tokens=32)
    prompt = "    def __init__(self, name):\n"
    plain = load("demo-target", drafter="none", max_rows=1).generate([prompt], params)[0]
    engine = load("demo-target", drafter="mtp", drafter_options={"head": str(place / "head")}, max_rows=1)
    handle = engine.generate([prompt], params)[0]

print(handle.text)
print(f"held-out loss {history[0]['held_loss']:.2f} -> {history[-1]['held_loss']:.2f}")
print(f"same text: {handle.tokens == plain.tokens}, {handle.stats.tau:.2f} tokens per target pass")
