"""The entry point: prepares vLLM's model runners for engines that ask, and imports nothing of vLLM's engine itself.

The modules of the runners take seconds to import, and some processes never need them. So they are prepared when vLLM
imports them. Tests: tests/integrations/vllm/test_plugin.py.
"""

from __future__ import annotations

import logging

from specdec_fast.integrations.vllm.compatibility import why_not_version
from specdec_fast.integrations.vllm.import_hook import when_imported

log = logging.getLogger("vllm.specdec")
"""A child of vLLM's logger, so that messages appear where vLLM's own appear."""

V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
V2_MODEL_STATE = "vllm.v1.worker.gpu.model_states.interface"


def register() -> None:
    """Prepares vLLM for engines that ask for a rule. It may be called any number of times, and never raises.

    Another version of vLLM gets one warning and stays as it is.
    """
    try:
        reason = why_not_version()
        if reason is not None:
            log.warning("%s", reason)
            return
        when_imported(V1_RUNNER, _prepare_v1)
        when_imported(V2_MODEL_STATE, _prepare_v2)
    except Exception as error:
        log.warning("specdec: the plugin was not registered, and vLLM runs without it: %r", error)


def _prepare_v1(module: object) -> None:
    from specdec_fast.integrations.vllm.v1_runner import prepare

    prepare(module)


def _prepare_v2(module: object) -> None:
    from specdec_fast.integrations.vllm.v2_sampler import prepare

    prepare(module)
