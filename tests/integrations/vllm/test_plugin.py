"""Registration, versions, settings, and engines that are refused; without vLLM."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from documents.blocks import IN_VLLM, fences
from oracles.fake_vllm import InputBatch, RejectionSampler, Sampler, SamplerOutput, buffer, sampling_metadata

from specdec_fast.integrations.vllm import compatibility, plugin, register, v1_runner
from specdec_fast.integrations.vllm.import_hook import when_imported
from specdec_fast.integrations.vllm.settings import read_settings

Patch = pytest.MonkeyPatch
Log = pytest.LogCaptureFixture


def test_the_page_shows_the_example(root: Path) -> None:
    """Which `test_lane_processes.py` runs. No other page has such a block."""
    found = {
        page.name: [block.source for block in fences(page.read_text(encoding="utf-8")) if IN_VLLM in block.info.split()]
        for page in [root / "README.md", *(root / "docs").rglob("*.md")]
    }
    (program,) = found.pop("vllm.md")
    assert program.strip() in (root / "examples" / "vllm_plugin.py").read_text(encoding="utf-8")
    assert not any(found.values())


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.4.dev3+cpu"])
def test_supported_versions(version: str) -> None:
    assert compatibility.why_not_version(version) is None


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "dev", ""])
def test_other_versions_are_refused_in_one_message(version: str) -> None:
    reason = compatibility.why_not_version(version)
    assert reason is not None and f"got vLLM {version}; expected at least 0.32 and below 0.33" in reason
    assert "vLLM runs without the plugin; install vllm>=0.32,<0.33" in reason


def test_register_never_raises_and_says_why(monkeypatch: Patch, caplog: Log) -> None:
    monkeypatch.setitem(sys.modules, "vllm.version", None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    before = list(sys.meta_path)
    register()
    assert "was not registered" in caplog.text and sys.meta_path == before
    monkeypatch.setattr(plugin, "why_not_version", lambda: compatibility.why_not_version("0.40.0"))
    caplog.clear()
    register()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "got vLLM 0.40.0" in message and sys.meta_path == before


def test_register_imports_nothing_and_is_idempotent(monkeypatch: Patch) -> None:
    monkeypatch.setattr(plugin, "why_not_version", lambda: None)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before, modules = len(sys.meta_path), set(sys.modules)
    register()
    assert len(sys.meta_path) == before + 2
    register()
    assert len(sys.meta_path) == before + 2 and set(sys.modules) == modules


def test_an_action_runs_once_when_a_module_is_imported(monkeypatch: Patch, tmp_path: Path, caplog: Log) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seen: list[Any] = []
    for name in ("hooked_module", "hooked_failure"):
        (tmp_path / f"{name}.py").write_text("VALUE = 3\n")
    before = list(sys.meta_path)
    when_imported("hooked_module", lambda module: seen.append(module.VALUE))
    assert importlib.util.find_spec("hooked_module") is not None and seen == [], "a look is no import"
    assert importlib.import_module("hooked_module").VALUE == 3 and seen == [3]
    when_imported("hooked_module", lambda module: seen.append(module))
    assert seen[1] is sys.modules["hooked_module"], "at once, if it was imported"

    def fail(module: ModuleType) -> None:
        raise RuntimeError("planted")

    when_imported("hooked_failure", fail)
    assert importlib.import_module("hooked_failure").VALUE == 3 and "planted" in caplog.text
    assert sys.meta_path == before
    for name in ("hooked_module", "hooked_failure"):
        sys.modules.pop(name)


def test_settings() -> None:
    for silent in (None, {}, {"other": 1}, {"specdec": None}, object()):
        assert read_settings(silent) is None
    assert read_settings({"specdec": {"rule": "replay"}}).rule == "replay"  # type: ignore[union-attr]
    assert read_settings({"specdec": {"rule": "token"}}).rule == "rejection"  # type: ignore[union-attr]
    drafter = read_settings({"specdec": {"drafter": {"min_match": 2}}})
    assert drafter is not None and drafter.rule is None and drafter.drafter == {"min_match": 2}


BAD = [
    ({"rule": "repley"}, "rule: got 'repley'; expected one of replay, rejection, block; .*did you mean 'replay'"),
    ({"rule": 3}, "rule: got 3; expected one of replay, rejection, block"),
    ({"rules": "replay"}, "specdec: got 'rules'; expected one of rule, drafter; .*did you mean 'rule'"),
    ("replay", "specdec: got 'replay'; expected a mapping; write additional_config"),
    ({}, "specdec: got no rule; expected one of replay, rejection, block"),
    ({"rule": "block", "drafter": [1]}, r"drafter: got \[1\]; expected options by name"),
]


@pytest.mark.parametrize(("asked", "message"), BAD)
def test_bad_settings_are_refused(asked: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_settings({"specdec": asked})


def fake_module(**options: Any) -> Any:
    """A module such as vLLM's `gpu_model_runner`, whose runners keep what they are given."""
    from dataclasses import make_dataclass

    class GPUModelRunner:
        def __init__(self, vllm_config: Any, device: Any) -> None:
            self.vllm_config, self.device = vllm_config, device
            self.speculative_config = vllm_config.speculative_config
            self.requests: dict[str, Any] = {}
            self.model_config = SimpleNamespace(seed=0)
            self.input_batch = InputBatch([], sampling_metadata([]))
            self.sampler, self.use_async_scheduling, self._draft_token_req_ids = Sampler(), False, None
            self.positions = torch.zeros(0)
            self.query_start_loc = self.input_ids = buffer(torch.zeros(0))

        def _get_spec_decode_draft_probs(self, spec_decode_metadata: Any) -> None: ...

        def _get_draft_token_ids_cpu(self) -> Any: ...

        def _sample(self, logits: Any, spec_decode_metadata: Any) -> str:
            return "stock"

    parts = {
        "GPUModelRunner": GPUModelRunner, "Sampler": Sampler, "RejectionSampler": RejectionSampler,
        "SamplerOutput": SamplerOutput, "SamplingMetadata": make_dataclass("SamplingMetadata", v1_runner._METADATA),
        "SpecDecodeMetadata": make_dataclass("SpecDecodeMetadata", v1_runner._DRAFTS),
    }  # fmt: skip
    return SimpleNamespace(**{**parts, **options})


def engine(module: Any, asked: Any, **speculation: Any) -> Any:
    """A runner of that module."""
    config = SimpleNamespace(additional_config=asked, speculative_config=None)
    if speculation:
        config.speculative_config = SimpleNamespace(
            **{"num_speculative_tokens": 3, "method": "ngram", "rejection_sample_method": "standard", **speculation}
        )
    return module.GPUModelRunner(config, "cpu")


def test_engines_that_do_not_ask_stay_as_they_are(caplog: Log) -> None:
    caplog.set_level(logging.INFO)
    module = fake_module()
    stock = module.GPUModelRunner._sample
    v1_runner.prepare(module)
    wrapped = module.GPUModelRunner.__init__
    v1_runner.prepare(module)
    assert module.GPUModelRunner.__init__ is wrapped, "idempotent"
    silent = [engine(module, asked) for asked in ({}, None, {"specdec": {"drafter": {"min_match": 2}}})]
    asking = engine(module, {"specdec": {"rule": "replay"}})
    assert [each._sample(None, None) for each in silent] == ["stock"] * 3
    assert all("_sample" not in vars(each) for each in silent) and module.GPUModelRunner._sample is stock
    assert "_sample" in vars(asking)
    assert [record.getMessage() for record in caplog.records] == [
        "specdec: this engine verifies and samples by rule replay"
    ]


def other_sample(self: Any, logits: Any) -> str:
    return "stock"


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"rule": "quick"}, {}, "got 'quick'; expected one of replay, rejection, block"),
    ({"rule": "block"}, {"num_speculative_tokens": 129}, "num_speculative_tokens: got 129; expected at most 128"),
    ({"rule": "block"}, {"rejection_sample_method": "synthetic"}, "got rejection_sample_method 'synthetic'; expected"),
]


def test_a_drafter_that_needs_the_rule_is_named_if_there_is_none(caplog: Log) -> None:
    module = fake_module()
    drafter = SimpleNamespace(needs_rule=True, name="recycling")
    init = module.GPUModelRunner.__init__

    def with_drafter(self: Any, *args: Any) -> None:
        init(self, *args)
        self.drafter = drafter

    module.GPUModelRunner.__init__ = with_drafter
    v1_runner.prepare(module)
    engine(module, {"specdec": {"rule": "block"}}, num_speculative_tokens=129)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.endswith("drafter recycling drafts nothing without the plugin's rule")


@pytest.mark.parametrize(("asked", "speculation", "message"), REFUSED)
def test_what_cannot_be_served_is_said_once_and_vllm_goes_on(
    caplog: Log, asked: Any, speculation: Any, message: str
) -> None:
    module = fake_module()
    v1_runner.prepare(module)
    made = engine(module, {"specdec": asked}, **speculation)
    assert made._sample(None, None) == "stock"
    (said,) = [record.getMessage() for record in caplog.records]
    assert message in said and said.startswith("specdec is off, and vLLM's own sampler runs: ")


def test_another_plugin_that_replaced_the_sampler_keeps_it(caplog: Log) -> None:
    module = fake_module()
    v1_runner.prepare(module)
    module.GPUModelRunner._sample = lambda self, logits, spec_decode_metadata: "theirs"
    assert engine(module, {"specdec": {"rule": "replay"}})._sample(None, None) == "theirs"
    assert "expected vLLM's own; another plugin has replaced it" in caplog.text and "VLLM_PLUGINS" in caplog.text


def test_other_signatures_are_refused(caplog: Log) -> None:
    module = fake_module(Sampler=type("Sampler", (), {"apply_logits_processors": lambda self, rows: rows}))
    module.GPUModelRunner._sample = other_sample
    v1_runner.prepare(module)
    made = engine(module, {"specdec": {"rule": "replay"}})
    assert made._sample(None) == "stock"
    assert "GPUModelRunner._sample has the parameters (self, logits), expected (self, logits, spec" in caplog.text
    assert "Sampler.compute_logprobs is missing" in caplog.text


def test_a_plugin_that_replaced_the_sampler_first_keeps_it(caplog: Log) -> None:
    """Also if it pretends, as `functools.wraps` does, that vLLM defines its function."""
    module = fake_module()
    stock = module.GPUModelRunner._sample
    theirs = FunctionType(stock.__code__, {"__name__": "other_plugin"})
    functools.update_wrapper(theirs, stock)
    module.GPUModelRunner._sample = theirs
    v1_runner.prepare(module)
    assert "_sample" not in vars(engine(module, {"specdec": {"rule": "replay"}}))
    assert "got GPUModelRunner._sample of module other_plugin; expected vLLM's own" in caplog.text


class DraftModel:
    """A drafter with vLLM's interface of another version."""

    def set_inputs_first_pass(self, target_token_ids: Any, next_token_ids: Any) -> Any: ...

    def _sample_draft_tokens(self, hidden_states: Any, sampling_metadata: Any) -> Any: ...


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        ("kind", "_get_spec_decode_draft_probs", "GPUModelRunner._get_spec_decode_draft_probs is missing"),
        ("kind", "_get_draft_token_ids_cpu", "GPUModelRunner._get_draft_token_ids_cpu is missing"),
        ("runner", "positions", "GPUModelRunner has no positions"),
        ("runner", "query_start_loc", "GPUModelRunner has no query_start_loc.gpu"),
        ("runner", "input_ids", "GPUModelRunner has no input_ids.gpu"),
        ("batch", "update_async_output_token_ids", "InputBatch.update_async_output_token_ids is missing"),
        ("batch", "update_async_spec_token_ids", "InputBatch.update_async_spec_token_ids is missing"),
        ("drafter", "", "DraftModel.set_inputs_first_pass has the parameters (self, target_token_ids, next_token_ids)"),
    ],
)
def test_all_that_is_used_is_checked(owner: str, name: str, message: str) -> None:
    module = fake_module()
    made = engine(module, {})
    stock = module.GPUModelRunner._sample
    assert v1_runner.why_not(made, module, stock) is None
    if owner == "drafter":
        made.drafter = DraftModel()
    elif owner == "batch":
        made.input_batch = SimpleNamespace(req_ids=[], generators={}, sampling_metadata=None)
    else:
        delattr(module.GPUModelRunner if owner == "kind" else made, name)
    assert message in str(v1_runner.why_not(made, module, stock))


def test_an_error_in_the_plugin_leaves_vllm_alone(monkeypatch: Patch, caplog: Log) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(v1_runner, "V1Sampler", fail)
    module = fake_module()
    v1_runner.prepare(module)
    assert engine(module, {"specdec": {"rule": "replay"}})._sample(None, None) == "stock" and "planted" in caplog.text


def test_a_misspelt_key_is_named(caplog: Log) -> None:
    module = fake_module()
    v1_runner.prepare(module)
    assert engine(module, {"spec_dec": {"rule": "replay"}})._sample(None, None) == "stock"
    assert "got 'spec_dec'; expected 'specdec'" in caplog.text
    caplog.clear()
    assert engine(module, {"other": 1})._sample(None, None) == "stock" and caplog.text == ""
