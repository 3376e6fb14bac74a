"""Make a transformers model generate speculatively, and see that its text stays as it was."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from specdec_fast.integrations.transformers import attach, attached, detach
from specdec_fast.loading import ASSETS

name = ASSETS / "demo-target"  # or a hub id
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
inputs = tokenizer("And it came to pass", return_tensors="pt")
expected = model.generate(**inputs, max_new_tokens=48, do_sample=False)

attach(model, draft="demo-draft")
found = model.generate(**inputs, max_new_tokens=48, do_sample=False, streamer=TextStreamer(tokenizer))
print("same text:", torch.equal(found, expected))
print(f"{attached(model).last[0].stats.tau:.2f} tokens per target pass")

detach(model)
