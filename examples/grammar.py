"""Text of a regular expression and of a JSON schema, with penalties, drafted as trees (extra: grammar).

Every node of a draft tree has the mask and the penalties of its own path, so speculation changes no text.
"""

from __future__ import annotations

import json

from specdec_fast import SamplingParams, load
from specdec_fast.integrations.llguidance import json_schema, regex

SCHEMA = {
    "type": "object",
    "properties": {
        "chapter": {"type": "integer", "minimum": 1, "maximum": 150},
        "word": {"enum": ["king", "prophet", "shepherd"]},
    },
    "required": ["chapter", "word"],
    "additionalProperties": False,
}


def main() -> None:
    drafted = load("demo-target", "demo-draft", drafter="draft_tree", drafter_options={"widths": [3, 2, 1]}, max_rows=2)
    plain = load("demo-target", drafter="none", max_rows=2)
    prompts = ["A verse of ", "As JSON: "]
    grammars = [regex(r"[1-9][0-9]?:[1-9][0-9]? (And|The) [a-z ]{8,20}\.", drafted.tokenizer)]
    grammars.append(json_schema(SCHEMA, drafted.tokenizer))
    params = [
        SamplingParams(seed=5, max_new_tokens=64, grammar=grammar, repetition_penalty=1.1, frequency_penalty=0.2)
        for grammar in grammars
    ]
    texts = drafted.generate(prompts, params)
    for handle in texts:
        print(repr(handle.text), handle.finish_reason)
    print("chapter:", json.loads(texts[1].text)["chapter"])
    same = [handle.tokens for handle in plain.generate(prompts, params)] == [handle.tokens for handle in texts]
    print(f"same texts without speculation: {same}; {drafted.stats.tau:.2f} tokens per target pass")


if __name__ == "__main__":
    main()
