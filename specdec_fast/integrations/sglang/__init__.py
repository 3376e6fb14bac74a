"""A plugin of SGLang that verifies its draft trees by a rule of this project. It does nothing unless it is asked to.

SGLang loads `register` through the entry point `sglang.srt.plugins`. The environment variable `SPECDEC_SGLANG_RULE`
names the rule. Without the variable nothing is imported and nothing changes. Tests: tests/integrations/test_sglang.py.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)


def register() -> str:
    """Registers the hook with SGLang, if `SPECDEC_SGLANG_RULE` names a rule. SGLang calls it in every process.

    It never raises. If it refuses, it logs the reason, and SGLang runs on as if the plugin were not installed.

    Returns:
        What was done, in one sentence.
    """
    rule = os.environ.get("SPECDEC_SGLANG_RULE", "").strip()
    if not rule:
        return "SPECDEC_SGLANG_RULE is not set, so SGLang verifies drafts itself"
    try:
        from specdec_fast.integrations.sglang.hook import install

        install(rule)
    except Exception as error:  # SGLang must start whatever is wrong here
        reason = f"specdec-fast does not verify the drafts of SGLang, which runs on as before: {error}"
        logger.warning(reason)
        return reason
    done = f"specdec-fast verifies the drafts of SGLang by rule {rule}"
    logger.info(done)
    return done
