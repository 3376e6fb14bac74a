"""The plugin against SGLang 0.5.23 itself: its names, its hooks, its trees and its greedy verification, on a CPU.

The package needs no installation: SPECDEC_SGLANG names a folder with its unpacked wheel (`make check-sglang`). Its
engine, which needs a GPU, is not run.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import fake_sglang as fake

from specdec_fast.embedding import links_from_parents, mask_from_parents, parents_from_links, parents_from_mask
from specdec_fast.integrations.sglang import hook
from specdec_fast.integrations.sglang.tree_sampler import TreeSampler


def package() -> Path | None:
    """The folder that holds the package `sglang`, or None."""
    named = os.environ.get("SPECDEC_SGLANG")
    if named:
        return Path(named).resolve()
    found = importlib.util.find_spec("sglang")
    return None if found is None or found.origin is None else Path(found.origin).parents[1]


FOLDER = package()
pytestmark = pytest.mark.skipif(FOLDER is None, reason="sglang is not there; `make check-sglang` fetches its wheel")


def tree_of(name: str) -> ast.Module:
    assert FOLDER is not None
    return ast.parse((FOLDER / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))


def definition(name: str, inside: str) -> Any:
    return next(each for each in ast.walk(tree_of(inside)) if getattr(each, "name", None) == name)


def test_the_version_and_the_function_are_those_that_the_plugin_expects() -> None:
    assert FOLDER is not None
    (metadata,) = FOLDER.glob("sglang-*.dist-info/METADATA")
    version = next(line for line in metadata.read_text().splitlines() if line.startswith("Version: "))
    hook.check_version(version.removeprefix("Version: "))
    function = definition(hook.FUNCTION, hook.MODULE)
    names = [each.arg for each in (*function.args.args, *function.args.kwonlyargs)]
    assert tuple(names) == hook.PARAMETERS
    returned = [ast.unparse(each) for each in ast.walk(function) if isinstance(each, ast.Return)]
    assert "return (predict, accept_lens, accept_index)" in returned


def test_the_names_that_the_plugin_reads_exist() -> None:
    used = {
        ("EagleVerifyInput", "sglang.srt.speculative.eagle_info"): (
            "draft_token", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "draft_token_num",
            "draft_probs", "max_tree_depth",
        ),
        ("NgramVerifyInput", "sglang.srt.speculative.ngram_info"): (
            "draft_token", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "draft_token_num",
            "max_tree_depth",
        ),
        ("SamplingBatchInfo", "sglang.srt.sampling.sampling_batch_info"): (
            "temperatures", "top_ks", "top_ps", "min_ps", "need_top_k_sampling", "need_top_p_sampling",
            "need_min_p_sampling", "sampling_seed", "acc_additive_penalties", "acc_scaling_penalties", "logit_bias",
            "has_watermark_candidates",
        ),
    }  # fmt: skip
    for (name, module), attributes in used.items():
        text = ast.unparse(definition(name, module))
        assert [each for each in attributes if each not in text] == []
    for name, module in (
        ("get_spec", "sglang.srt.runtime_context"),
        ("get_parallel", "sglang.srt.runtime_context"),
        ("sanitize_nan_logits", "sglang.srt.utils.async_probe"),
        ("is_dp_attention_enabled", "sglang.srt.layers.dp_attention"),
    ):
        definition(name, module)
    assert "SIMULATE_ACC_LEN = " in ast.unparse(tree_of("sglang.srt.speculative.spec_utils"))
    threshold = "speculative_accept_threshold_single"
    assert threshold in ast.unparse(definition(hook.FUNCTION, hook.MODULE))


def test_its_registry_applies_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own registry, on a module with the function's name; importers of the function are patched too."""
    assert FOLDER is not None
    stand = fake.install(monkeypatch)
    name = "sglang.srt.plugins.hook_registry"
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name.replace('.', '/')}.py")
    assert spec is not None and spec.loader is not None
    registry = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(registry)
    monkeypatch.setitem(sys.modules, name, registry)
    module, plain = stand.modules[hook.MODULE], fake.eagle_sample
    monkeypatch.setattr(fake, "eagle_sample", plain)  # restores it: the registry patches all that import it
    hook.install("replay")
    registry.HookRegistry.apply_hooks()
    assert vars(module)["eagle_sample"] is not plain and vars(module)["eagle_sample"] is fake.eagle_sample
    given = fake.verify_input(torch.tensor([[-1, 0]]), torch.tensor([[0, 1]]))
    predict, lengths, accept_index = fake.eagle_sample(
        given, fake.batch([3]), fake.logits_output(torch.zeros(2, 4)), None, watermark_state=None
    )
    assert predict.shape == (2,) and 1 <= int(lengths[0]) <= 2 and accept_index[0, 0] == 0
    with pytest.raises(hook.RefusalError, match="got another hook"):
        hook.install("replay")


def test_its_trees_and_its_greedy_verification() -> None:
    """SGLang's Triton kernels in the interpreter: our conversions read its trees, and greedy answers are equal."""
    program = Path(__file__).parents[1] / "oracles" / "sglang_reference.py"
    done = subprocess.run(
        [sys.executable, str(program), str(FOLDER)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    found = {name: torch.tensor(value) for name, value in json.loads(done.stdout).items()}
    parents = parents_from_links(found["next_token"], found["next_sibling"])
    links = links_from_parents(parents)
    assert torch.equal(links.node_index, found["index"])
    assert torch.equal(links.next_token, found["next_token"])
    assert torch.equal(links.next_sibling, found["next_sibling"])
    assert torch.equal(mask_from_parents(parents), found["mask"]) and torch.equal(
        parents_from_mask(found["mask"]), parents
    )
    depth = mask_from_parents(parents).sum(-1) - 1
    assert torch.equal(found["positions"], found["lengths"][:, None] + depth)
    rows, nodes = found["tokens"].shape
    given = fake.verify_input(parents, found["tokens"], max_tree_depth=found["accept_index"].shape[1])
    cold: dict[str, Any] = {"top_ks": torch.ones(rows, dtype=torch.int32), "need_top_k_sampling": True}
    batch, logits = fake.batch(found["lengths"].tolist(), **cold), fake.logits_output(found["logits"].float())
    with pytest.MonkeyPatch.context() as patch:
        fake.install(patch)
        for rule in hook.RULES:
            predict, lengths, accept_index = TreeSampler(rule)(fake.eagle_sample, given, batch, logits)
            assert torch.equal(accept_index, found["accept_index"].int())
            assert torch.equal(lengths, found["correct"].int() + 1) and int(found["correct"].max()) > 0
            assert torch.equal(predict, found["predict"].int())
    assert rows * nodes == len(found["predict"])
