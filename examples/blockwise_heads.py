"""Train the layer of blockwise parallel decoding for some seconds, draft chains with it, and get the same text.

Needs the extra `train`.
"""

import argparse
import tempfile
from pathlib import Path

from specdec_fast import SamplingParams, load
from specdec_fast.heads.blockwise import BlockwiseHeads
from specdec_fast.heads.checkpoint_blockwise import save_blockwise
from specdec_fast.loading import load_model, load_tokenizer
from specdec_fast.train.heads.parallel import ParallelHeadsTrainee
from specdec_fast.train.heads.settings import Settings
from specdec_fast.train.heads.target_states import TargetStates
from specdec_fast.train.heads.trainer import fit
from specdec_fast.train.heads.training_texts import read_token_row, split

TEXT = Path(argparse.__file__)  # any text that the target knows how to continue

with tempfile.TemporaryDirectory() as folder:
    model, place = load_model("demo-target"), Path(folder)
    states = TargetStates(model, ("final_norm",))
    heads = BlockwiseHeads(states.hidden_size, model.config.vocab_size, 3)
    settings = Settings(steps=20, batch=2, length=64, lr=4e-3)
    row, held = split(read_token_row([TEXT], "text", load_tokenizer("demo-target")), settings.length, blocks=4)
    trainee = ParallelHeadsTrainee(heads, states, decay=1.0, labels="target")
    history = fit(trainee, states, row, held, settings, place).history
    save_blockwise(heads, place / "head", base_model="demo-target")
    params = SamplingParams(temperature=0, max_new_tokens=32)
    prompt = "    def __init__(self, name):\n"
    plain = load("demo-target", drafter="none", max_rows=1).generate([prompt], params)[0]
    engine = load("demo-target", drafter="blockwise", drafter_options={"head": str(place / "head")}, max_rows=1)
    handle = engine.generate([prompt], params)[0]

print(handle.text)
print(f"held-out loss {history[0]['held_loss']:.2f} -> {history[-1]['held_loss']:.2f}")
print(f"same text: {handle.tokens == plain.tokens}, {handle.stats.tau:.2f} tokens per target pass")
