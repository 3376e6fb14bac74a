"""Plugin for vLLM: the project's verification rules in place of vLLM's samplers, and drafters that vLLM may load.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in every process. An engine is changed only
if it asks: `additional_config={"specdec": {"rule": "replay"}}`. docs/guides/vllm.md has a complete program.
Tests: tests/integrations/vllm/.
"""

from __future__ import annotations

from specdec_fast.integrations.vllm.plugin import register

__all__ = ["register"]
