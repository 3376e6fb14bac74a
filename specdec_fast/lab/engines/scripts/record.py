"""Records texts of an engine, for `specdec lab --engine`.

Runs in the interpreter of the engine under test: `python record.py ENGINE JOBS.json ANSWERS.json`. It needs that engine
alone. A job is a list of prompts with seeds; its answer is a list of texts, or the reason why there are none.
Tests: tests/lab/engines/test_recording.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

Sampling = dict[str, float]
"""temperature, top_k (0 is off) and top_p. Temperature 0 is greedy."""


class TransformersRecorder:
    """`generate` of transformers, with one way of drafting.

    Attributes:
        versions: Name -> version of the packages that produce the texts.
    """

    def __init__(self, models: dict[str, str], setting: dict[str, Any]) -> None:
        import torch
        import transformers
        from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self.model = AutoModelForCausalLM.from_pretrained(models["target"], dtype=torch.float32).eval()
        self.options: dict[str, Any] = dict(setting.get("options", {}))
        if setting.get("draft"):
            kind = AutoModel if setting["draft"] == "headless" else AutoModelForCausalLM
            draft = kind.from_pretrained(models["draft"], dtype=torch.float32).eval()
            self.options["assistant_model"] = draft
            for name, value in setting.get("draft_generation", {}).items():
                setattr(draft.generation_config, name, value)
        if setting.get("tokenizers"):
            self.options["tokenizer"] = AutoTokenizer.from_pretrained(models["target"])
            self.options["assistant_tokenizer"] = AutoTokenizer.from_pretrained(models["draft"])
        if setting.get("tokenizers") == "sorted":
            for name in ("tokenizer", "assistant_tokenizer"):
                vocabulary = sorted(self.options[name].get_vocab().items(), key=lambda item: item[1])
                self.options[name].get_vocab = lambda found=dict(vocabulary): found
        if setting.get("attach"):
            self.versions["specdec-fast"] = import_module("specdec_fast").__version__
            attach = import_module("specdec_fast.integrations.transformers").attach
            attach(self.model, models["draft"], **setting["attach"])

    def texts(
        self, prompts: list[list[int]], seeds: list[int], sampling: Sampling, count: int, together: bool
    ) -> Iterator[list[int]]:
        """Yields `count` new tokens of each prompt. A batch is seeded once, by its first seed."""
        import torch

        settings: dict[str, Any] = {"max_new_tokens": count, "pad_token_id": 0, **self.options}
        settings |= {"do_sample": True, **sampling} if sampling["temperature"] > 0 else {"do_sample": False}
        step = len(prompts) if together else 1
        for at in range(0, len(prompts), step):
            batch = prompts[at : at + step]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(each)) + each for each in batch])
            mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in batch])
            torch.manual_seed(seeds[at])
            yield from self.model.generate(ids, attention_mask=mask, **settings)[:, width:].tolist()


class VllmRecorder:
    """vLLM's `LLM`, with one way of drafting.

    Attributes:
        versions: Name -> version of the packages that produce the texts.
    """

    max_sequences = 64

    def __init__(self, models: dict[str, str], setting: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        import torch
        import vllm

        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        speculation = dict(setting.get("speculation", {}))
        if setting.get("draft"):
            speculation["model"] = models["draft"]
        more: dict[str, Any] = {}
        if setting.get("plugin"):
            self.versions["specdec-fast"] = import_module("specdec_fast").__version__
            more["additional_config"] = {"specdec": setting["plugin"]}
        self.engine = vllm.LLM(
            models["target"],
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=self.max_sequences,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            speculative_config=speculation or None,
            **more,
        )

    def texts(
        self, prompts: list[list[int]], seeds: list[int], sampling: Sampling, count: int, together: bool
    ) -> Iterator[list[int]]:
        """Yields `count` new tokens of each prompt."""
        from vllm import SamplingParams

        step = 4 * self.max_sequences if together else 1
        for at in range(0, len(prompts), step):
            outputs = self.engine.generate(
                [{"prompt_token_ids": each} for each in prompts[at : at + step]],
                [
                    SamplingParams(max_tokens=count, seed=seed, ignore_eos=True, detokenize=False, **sampling)
                    for seed in seeds[at : at + step]
                ],
                use_tqdm=False,
            )
            yield from (list(each.outputs[0].token_ids) for each in outputs)


class CallableRecorder:
    """A sampler of your own: `module:factory`, where `factory(models)` returns the sampler.

    `models` has the folders of the `target` and the `draft`. The sampler is called with keywords `prompts`, `seeds`,
    `max_new_tokens`, `temperature`, `top_k` and `top_p`, and returns a list of token lists, one per prompt.

    Attributes:
        versions: Name -> version of the packages that produce the texts.
    """

    def __init__(self, models: dict[str, str], setting: dict[str, Any]) -> None:
        module, _, name = setting["sampler"].partition(":")
        sys.path.insert(0, os.getcwd())
        loaded = import_module(module)
        self.sampler = getattr(loaded, name)(models)
        self.versions = {setting["sampler"]: str(getattr(loaded, "__version__", "unknown"))}

    def texts(
        self, prompts: list[list[int]], seeds: list[int], sampling: Sampling, count: int, together: bool
    ) -> Iterator[list[int]]:
        """Yields `count` new tokens of each prompt."""
        step = 64 if together else 1
        for at in range(0, len(prompts), step):
            batch = prompts[at : at + step]
            found = self.sampler(prompts=batch, seeds=seeds[at : at + step], max_new_tokens=count, **sampling)
            texts = [[int(token) for token in text] for text in found]
            if [len(text) for text in texts] != [count] * len(batch):
                lengths = sorted({len(text) for text in texts})
                raise ValueError(
                    f"sampler: got {len(texts)} texts of {lengths} tokens; expected {len(batch)} of {count}"
                )
            yield from texts


RECORDERS: dict[str, Callable[[dict[str, str], dict[str, Any]], Any]] = {
    "transformers": TransformersRecorder,
    "vllm": VllmRecorder,
    "callable": CallableRecorder,
}


def main(engine: str, jobs: Path, answers: Path) -> None:
    """Runs the jobs of a file until one fails. Writes their answers, those so far after each of them."""
    order = json.loads(jobs.read_text())
    recorder = RECORDERS[engine](order["models"], order["setting"])
    found: dict[str, Any] = {"versions": recorder.versions, "jobs": {}}
    answers.write_text(json.dumps(found))
    print("started", flush=True)
    for name, job in order["jobs"].items():
        texts: list[list[int]] = []
        said = time.monotonic()
        try:
            for text in recorder.texts(**job):
                texts.append(text)
                if len(texts) % 50 == 0 or time.monotonic() - said > 5:
                    print(f"progress {name} {len(texts)} {len(job['prompts'])}", flush=True)
                    said = time.monotonic()
            found["jobs"][name] = {"texts": texts}
        except Exception as error:  # a job that cannot run is a result
            found["jobs"][name] = {"failed": f"{type(error).__name__}: {error}"}
        part = answers.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.replace(answers)
        if "failed" in found["jobs"][name]:
            break  # the engine may be in any state: a new process does the other jobs


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
