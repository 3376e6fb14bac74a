"""Stream a text from the bundled pair of models and see how much work speculation saved."""

from specdec_fast import SamplingParams, load

engine = load("demo-target", "demo-draft")
handle = engine.submit("And it came to pass", SamplingParams(temperature=0.8, seed=7, max_new_tokens=64))
for piece in engine.stream(handle):
    print(piece, end="", flush=True)
print(f"\n{len(handle.tokens)} tokens, {handle.stats.tau:.2f} tokens per target pass")
