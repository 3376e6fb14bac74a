"""Train an EAGLE-3 head on a text for some seconds, draft trees with it, and get the same text in fewer passes.

Needs the extra `train`.
"""

import argparse
import tempfile
from pathlib import Path

from specdec_fast import SamplingParams, load
from specdec_fast.heads.checkpoint_eagle import save_eagle3
from specdec_fast.loading import load_model, load_tokenizer
from specdec_fast.train.heads.recurrent import Eagle3Trainee, frequent_ids, new_eagle3
from specdec_fast.train.heads.settings import Settings
from specdec_fast.train.heads.target_states import TargetStates
from specdec_fast.train.heads.trainer import fit
from specdec_fast.train.heads.training_texts import read_token_row, split

TEXT = Path(argparse.__file__)  # any text that the target knows how to continue

with tempfile.TemporaryDirectory() as folder:
    model, place = load_model("demo-target"), Path(folder)
    settings = Settings(steps=20, batch=2, length=64, lr=4e-3)
    row, held = split(read_token_row([TEXT], "text", load_tokenizer("demo-target")), settings.length, blocks=4)
    head = new_eagle3(model, frequent_ids(row, 512, 1024))
    states = TargetStates(model, (*head.aux_hidden_states, "final_norm"))
    history = fit(Eagle3Trainee(head, states, ahead=3), states, row, held, settings, place).history
    save_eagle3(place / "head", head)
    params = SamplingParams(temperature=0, max_new_tokens=32)
    prompt = "    def __init__(self, name):\n"
    plain = load("demo-target", drafter="none", max_rows=1).generate([prompt], params)[0]
    engine = load("demo-target", drafter="eagle3", drafter_options={"head": str(place / "head")}, max_rows=1)
    handle = engine.generate([prompt], params)[0]

print(handle.text)
print(f"held-out loss {history[0]['held_loss']:.2f} -> {history[-1]['held_loss']:.2f}")
print(f"same text: {handle.tokens == plain.tokens}, {handle.stats.tau:.2f} tokens per target pass")
