"""vLLM's hidden-state connector, made to work on CPUs and to hand tensors over in memory.

vLLM's own one (0.32) copies through pinned memory and CUDA events, which a CPU lacks. The engine
that extracts runs inside the process that asks (serving.extract), so no file is needed.
"""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)

# hidden_states_path of a finished request -> [tokens, layers, hidden], until it is taken.
FINISHED: dict[str, torch.Tensor] = {}


class _Copied:
    """Stands in for the CUDA event of a copy that has already ended."""

    def query(self) -> bool:
        return True


class InMemoryConnector(ExampleHiddenStatesConnector):
    """Keeps the hidden states of each finished request in FINISHED."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        assert self._kv_cache is not None, "vLLM registers the cache before the first request"
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        offsets = torch.arange(self._block_size)
        slots = (blocks[:, None] * self._block_size + offsets).flatten().to(self._kv_cache.device)
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        # Copied even on the CPU: the next request may get these blocks as soon as this returns.
        FINISHED[pending.filename] = states.to("cpu", copy=True)
        self._req_copy_events[pending.req_id] = _Copied()  # type: ignore[assignment]
