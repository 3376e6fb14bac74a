"""A ragged batch: requests with parameters of their own join and leave while others run; one is cancelled.

Nothing is padded, and no request waits for another: a finished row makes room for the next request in the queue. The
text of a request does not depend on the other requests of the batch.
"""

from __future__ import annotations

from specdec_fast import Handle, SamplingParams, load

REQUESTS = {
    "greedy": ("And the king said", SamplingParams(temperature=0, max_new_tokens=24)),
    "sampled": ("And the king said", SamplingParams(temperature=1, seed=1, max_new_tokens=40)),
    "nucleus": ("import os\n\ndef ", SamplingParams(temperature=0.8, top_p=0.9, seed=2, max_new_tokens=32)),
    "one verse": ("1:1 In the ", SamplingParams(temperature=0.7, seed=3, stop=("\n",), max_new_tokens=48)),
    "too long": ("class Engine:", SamplingParams(seed=4, max_new_tokens=400)),
}


def main() -> None:
    engine = load("demo-target", "demo-draft", max_rows=3)
    handles: dict[str, Handle] = {}
    for name in ("greedy", "sampled", "nucleus", "too long"):  # four requests, three rows: the last one waits
        handles[name] = engine.submit(*REQUESTS[name])

    steps = 0
    running: set[str] = set()
    while not engine.idle:
        engine.step()
        steps += 1
        if steps == 5:  # requests may join at any time, here one without speculation
            handles["one verse"] = engine.submit(*REQUESTS["one verse"], num_draft_tokens=0)
        if len(handles["too long"].tokens) > 20:
            engine.cancel(handles["too long"])
        now = {name for name, handle in handles.items() if handle.row is not None}
        for name in sorted(now - running):
            print(f"step {steps:3}: {name} joins")
        for name in sorted(running - now):
            print(f"step {steps:3}: {name} leaves, {handles[name].finish_reason}")
        running = now

    print()
    for name, handle in handles.items():
        stats = handle.stats
        print(f"{name}: {len(handle.tokens)} tokens in {stats.steps} steps, tau {stats.tau:.2f}")
        print(f"  {handle.text!r}")

    alone = load("demo-target", drafter="none").generate([REQUESTS["sampled"][0]], REQUESTS["sampled"][1])[0]
    print(f"\nthe same text alone and without speculation: {alone.text == handles['sampled'].text}")
    rates = ", ".join(f"{rate:.2f}" for rate in engine.stats.alpha_per_position)
    print(f"acceptance by depth: {rates}")


if __name__ == "__main__":
    main()
