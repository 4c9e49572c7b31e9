"""The vLLM worker that `serving.vllm_server` asks for on CPUs; it refuses to run a drafter wrongly.

Without its plugin (serving.cpu_fixes) vLLM computes wrongly and reports nothing. So the check is in
the process that would compute, before any weight is read. The worker can also record what it
drafts, for serving.drafts: vLLM reports how many drafts it accepted, but never which tokens it
drafted.
"""

import json
import os
from typing import Any

import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.cpu_worker import CPUWorker

from serving import cpu_fixes


class CheckedCPUWorker(CPUWorker):
    """`--worker-cls serving.worker.CheckedCPUWorker`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        threads = os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())
        torch.set_num_threads(int(threads))  # until here it was one, see serving.launch

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the weights; with a speculative config, only after cpu_fixes.require()."""
        if self.vllm_config.speculative_config is not None:
            cpu_fixes.require()
        super().load_model(*args, **kwargs)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts that the scheduler asks for after every step. They are also appended to the
        file that FLYWHEEL_DRAFTS names, if it is set.
        """
        taken = super().take_draft_token_ids()
        path = os.environ.get("FLYWHEEL_DRAFTS")
        if taken is not None and path:
            with open(path, "a") as stream:
                for name, tokens in zip(taken.req_ids, taken.draft_token_ids, strict=True):
                    stream.write(json.dumps([name, tokens]) + "\n")
        return taken
