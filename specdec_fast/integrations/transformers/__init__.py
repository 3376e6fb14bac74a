"""transformers: `model.generate`, pipelines, streamers and `transformers serve`, decoded speculatively."""

from specdec_fast.integrations.transformers.attachment import Attachment, attach, attached, detach
from specdec_fast.integrations.transformers.hub_folder import generate_attached, write_custom_generate
from specdec_fast.integrations.transformers.refusals import RefusedCallError

__all__ = [
    "Attachment",
    "RefusedCallError",
    "attach",
    "attached",
    "detach",
    "generate_attached",
    "write_custom_generate",
]
