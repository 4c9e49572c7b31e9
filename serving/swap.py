"""Another drafter in a running vLLM: what depends on its V1 model runner and DFlash proposer.

vLLM loads `DrafterSwap` into its workers (`--worker-extension-cls serving.swap.DrafterSwap`), and
serving.replica calls it by worker RPC. A drafter of the same shape is loaded beside the running one
by vLLM's own loader, with all it derives from weights (fused projections of the context keys and
values, packed matrices of a CPU). That fresh load gives the fingerprint and the drafts of a fixed
probe that must come out again once it serves. Then, while the engine is paused, both change places:
as objects where vLLM runs eagerly, else tensor by tensor in the memory that compiled code and CUDA
graphs read. Changing places twice restores the former drafter bit by bit.

Without new fused buffers and an empty prefix cache, 2.9 % of the drafts are right (vLLM's cache
holds context keys of the former drafter); pausing with `clear_cache` empties it.

Measured on CPUs, eager. The copy in place is exercised there too, CUDA graphs never were.
"""

import hashlib
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata

PROBE_TOKENS = 8
"""Context positions of the probe: seeded random features, in vLLM's null block, which holds no
request's keys."""
FUSED = ("_fused_kv_weight", "_fused_kv_bias", "_k_norm_weights", "_hidden_norm_weight")
"""What DFlashQwen3Model derives from its weights and keeps outside of parameters and buffers."""


class DrafterSwap:
    """Methods of a worker, by RPC; each returns plain values, one set per worker.

    `describe`, `stage`, `exchange` and `unstage` of `--worker-extension-cls`, with a prefix that no
    method of vLLM has.
    """

    model_runner: Any
    vllm_config: Any

    def flywheel_describe(self) -> dict[str, Any]:
        """What drafts now (`_look`), or {} without a drafter."""
        return self._look(_bare(self._drafter.model)) if self._drafter is not None else {}

    def flywheel_stage(self, folder: str) -> dict[str, Any]:
        """Load a folder of the running shape beside the running drafter; returns its `_look`."""
        self.flywheel_unstage()
        fresh = self._load(folder)
        found = self._look(fresh)
        _staged(self)["model"] = fresh
        return found

    def flywheel_exchange(self) -> dict[str, Any]:
        """The staged drafter serves, and the one that served is staged; returns the `_look` of what
        serves then. Only while the engine is paused.
        """
        drafter, kept = self._drafter, _staged(self)
        live, fresh = _bare(drafter.model), kept["model"]
        if self.vllm_config.model_config.enforce_eager:
            assert drafter.model is live, "an eager drafter is not wrapped"
            drafter.model, kept["model"] = fresh, live
            context = self.vllm_config.compilation_config.static_forward_context
            context.update(_attention(fresh))
        else:
            _exchange_values(live, fresh, self.model_runner.model)
        return self._look(_bare(drafter.model))

    def flywheel_unstage(self) -> None:
        """Forget the staged drafter."""
        _staged(self).clear()

    def flywheel_silence(self, silent: bool) -> bool:
        """Draft nothing from the next step on, or draft again; returns whether that is possible.

        With asynchronous scheduling the scheduler reckons with drafts before it has them, so there
        it is not. Only while the engine is paused.
        """
        if self.vllm_config.scheduler_config.async_scheduling:
            return False
        if silent:
            self._drafter.propose = _nothing
        else:
            self._drafter.__dict__.pop("propose", None)
        return True

    @property
    def _drafter(self) -> Any:
        return getattr(self.model_runner, "drafter", None)

    @torch.inference_mode()
    def _look(self, model: nn.Module) -> dict[str, Any]:
        """Number of loaded tensors, their sha256, and the drafts of the probe."""
        tensors = _tensors(model, self.model_runner.model)
        digest = hashlib.sha256()
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            flat = tensor.detach().contiguous().flatten()  # a view of other width needs a dimension
            digest.update(flat.view(torch.uint8).cpu().numpy().data)
        return {
            "tensors": len(tensors),
            "parameters_sha256": digest.hexdigest(),
            "probe": self._probe(model),
        }

    def _load(self, folder: str) -> nn.Module:
        """A drafter as vLLM loads it at its start; the running one goes on undisturbed."""
        drafter = self._drafter
        live, config = drafter.model, drafter.speculative_config.draft_model_config
        context = self.vllm_config.compilation_config.static_forward_context
        layers = _attention(_bare(live))
        named = config.model
        for name in layers:
            del context[name]  # vLLM refuses a second layer of the same name
        try:
            config.model = folder
            with set_current_vllm_config(self.vllm_config):
                drafter.model = drafter._get_model()
                drafter._maybe_share_embeddings(self.model_runner.model)
                drafter._maybe_share_lm_head(self.model_runner.model)
            fresh = drafter.model
        finally:
            config.model, drafter.model = named, live
            context.update(layers)
        for name, layer in _attention(fresh).items():
            layer.kv_cache = layers[name].kv_cache
            if hasattr(layers[name], "isa"):
                layer.isa = layers[name].isa
        return fresh

    def _probe(self, model: nn.Module) -> list[int]:
        """The drafts of `model` after PROBE_TOKENS positions of random features."""
        drafter: Any = self._drafter
        device, n = drafter.device, PROBE_TOKENS
        width = model.get_submodule("model.fc").input_size
        noise = torch.randn(n, int(width), generator=torch.Generator().manual_seed(0))  # pyright: ignore[reportArgumentType]
        blocks = -(-(n + drafter.max_query_tokens) // drafter.block_size)
        ends = torch.tensor([0, n], dtype=torch.int32)
        length = torch.tensor([n], dtype=torch.int32)
        metadata = CommonAttentionMetadata(
            query_start_loc=ends.to(device),
            query_start_loc_cpu=ends,
            seq_lens=length.to(device),
            seq_lens_cpu_upper_bound=length,
            num_reqs=1,
            num_actual_tokens=n,
            max_query_len=n,
            max_seq_len=n,
            block_table_tensor=torch.zeros(1, blocks, dtype=torch.int32, device=device),
            slot_mapping=torch.arange(n, device=device),
        )
        positions = torch.arange(n, device=device)
        with _drafting_with(drafter, model):
            found = type(drafter).propose(
                drafter,
                drafter.speculative_config.num_speculative_tokens,
                target_token_ids=positions.to(torch.int32),
                target_positions=positions,
                target_hidden_states=noise.to(device, self.vllm_config.model_config.dtype),
                next_token_ids=torch.ones(1, dtype=torch.int32, device=device),
                token_indices_to_sample=None,
                common_attn_metadata=metadata,
                sampling_metadata=SimpleNamespace(all_greedy=True),
            )
        return found.flatten().tolist()


@contextmanager
def _drafting_with(drafter: Any, model: nn.Module):
    live, count = drafter.model, drafter.num_speculative_tokens
    drafter.model = model if _bare(live) is not model else live
    try:
        yield
    finally:
        drafter.model, drafter.num_speculative_tokens = live, count


def _nothing(*_: Any, common_attn_metadata: CommonAttentionMetadata, **__: Any) -> Tensor:
    """A proposal of no drafts, as vLLM's own for K = 0."""
    device = common_attn_metadata.query_start_loc.device
    return torch.empty(common_attn_metadata.batch_size(), 0, dtype=torch.int64, device=device)


def _staged(worker: Any) -> dict[str, nn.Module]:
    """What a worker has staged. Not set in __init__: vLLM never calls that of an extension."""
    return worker.__dict__.setdefault("flywheel_staged", {})


def _bare(model: Any) -> nn.Module:
    """The module inside a wrapper for CUDA graphs."""
    return model if isinstance(model, nn.Module) else model.unwrap()


def _attention(model: nn.Module) -> dict[str, Any]:
    """The attention layers of a drafter, by the names that vLLM's forward context knows."""
    layers: Any = model.get_submodule("model.layers")
    return {layer.self_attn.attn.layer_name: layer.self_attn.attn for layer in layers}


def _tensors(model: nn.Module, target: nn.Module) -> dict[str, Tensor]:
    """What was loaded for a drafter: not what it shares with the target, and not matrices that a
    CPU build keeps packed only (their effect is in the probe).
    """
    shared = {id(tensor) for tensor in target.parameters()}
    found = dict([*model.named_parameters(), *model.named_buffers()])
    inner: Any = model.get_submodule("model")
    found |= {name: getattr(inner, name) for name in FUSED if getattr(inner, name) is not None}
    return {name: t for name, t in found.items() if t.numel() and id(t) not in shared}


def _exchange_values(live: nn.Module, fresh: nn.Module, target: nn.Module) -> None:
    """Exchange the values of two drafters, each staying where it is in memory.

    Raises ValueError, before anything changes, if they do not have the same tensors.
    """
    ours, theirs = _tensors(live, target), _tensors(fresh, target)
    shapes = [{n: (t.shape, t.dtype) for n, t in side.items()} for side in (ours, theirs)]
    if shapes[0] != shapes[1]:
        raise ValueError("the two drafters do not have the same tensors in memory")
    done = set()
    for name, tensor in ours.items():
        if tensor.data_ptr() not in done:  # _hidden_norm_weight is another name of a parameter
            done.add(tensor.data_ptr())
            kept = tensor.detach().clone()
            tensor.data.copy_(theirs[name])
            theirs[name].data.copy_(kept)
