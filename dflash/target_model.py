"""The frozen target: its embedding and head, and one pass that reads its features.

Transformers is imported only where a model is run: that takes seconds, and training never needs it.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dflash.identity import model_files

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
ROWS_PER_CHUNK = 256


def resolve_dtype(name: str, device: str = "cpu") -> torch.dtype:
    """The compute dtype. `auto`: bfloat16 where the hardware multiplies it natively, else float32.

    On a CPU without avx512_bf16 or AMX a bfloat16 product is emulated: about six times slower.
    Raises ValueError for another name.
    """
    if name == "auto":
        fast = device != "cpu" or torch.cpu._is_avx512_bf16_supported() or _amx()
        return torch.bfloat16 if fast else torch.float32
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ValueError(f"dtype {name!r} is not one of auto, {', '.join(known)}")
    return known[name]


def resolve_training_dtype(name: str, target: torch.dtype, device: str = "cpu") -> torch.dtype:
    """The dtype of matrix products in training; weights and all that accumulates stay float32.

    `auto`: the target's dtype on an accelerator or with AMX, else float32. On a CPU with
    avx512_bf16 alone, bfloat16 makes serving faster, because half the bytes are read. But a product
    of many rows, as in training, takes 1.4 times as long (docs/decisions/003). Raises ValueError
    for another name.
    """
    if name != "auto":
        return resolve_dtype(name, device)
    return target if device != "cpu" or _amx() else torch.float32


def _amx() -> bool:
    return bool(torch.cpu._is_amx_tile_supported())


@dataclass
class Target:
    """A loaded target. `embedding` and `head` are [V, H]; both belong to the frozen model."""

    model: "PreTrainedModel"
    dtype: torch.dtype
    embedding: Tensor
    head: Tensor
    num_layers: int

    @torch.inference_mode()
    def features(self, batch: Sequence[Sequence[int]], taps: Sequence[int]) -> list["Features"]:
        """One teacher-forced pass: for each sequence its tap outputs and last hidden states.

        batch: token ids, any lengths (padded on the right, which a causal model never sees).
        A prefix that all share (a system prompt) is computed once.
        """
        from transformers import DynamicCache

        prefix = common_prefix(batch)
        longest = max(len(ids) for ids in batch)
        padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in batch])
        padded = padded.to(self.embedding.device)
        cache = DynamicCache(config=self.model.config)
        parts = [self._forward(padded[:1, :prefix], cache, taps)] if prefix else []
        if parts:
            cache.batch_repeat_interleave(len(batch))
        parts.append(self._forward(padded[:, prefix:], cache, taps))
        joined = torch.cat([p.taps.expand(len(batch), -1, -1) for p in parts], dim=1)
        last = torch.cat([p.last.expand(len(batch), -1, -1) for p in parts], dim=1)
        return [
            Features(taps=joined[i, : len(ids)].clone(), last=last[i, : len(ids)].clone())
            for i, ids in enumerate(batch)
        ]

    def room(self) -> float:
        """The most tokens that a sequence may have in `features`: only memory limits it."""
        return math.inf

    def _forward(self, ids: Tensor, cache: "DynamicCache", taps: Sequence[int]) -> "Features":
        """Taps and last with a batch dimension; extends the cache."""
        with Taps(self.model, taps) as tapped:
            last = backbone(self.model)(
                input_ids=ids, past_key_values=cache, use_cache=True
            ).last_hidden_state
        return Features(tapped.joined(), last)

    @torch.inference_mode()
    def logits(self, last: Tensor) -> Tensor:
        """Last hidden states [T, H] (after the final norm), on any device -> logits [T, V]."""
        return last.to(self.head.device).contiguous() @ self.head.T


@torch.inference_mode()
def top_logprobs(last_TH: Tensor, head: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest next tokens and their log-probabilities, [T, k] each, best first, on the CPU.

    last [T, H] after the final norm, head [V, H]; one chunk of logits at a time. Raises ValueError
    if k exceeds the vocabulary.
    """
    if k > len(head):
        raise ValueError(
            f"harvest.top_k = {k}: the target's vocabulary has only {len(head)} tokens"
        )
    found = [
        (rows.contiguous() @ head.T).float().log_softmax(-1).topk(k)
        for rows in last_TH.split(ROWS_PER_CHUNK)
    ]
    return torch.cat([f.indices for f in found]).cpu(), torch.cat([f.values for f in found]).cpu()


@dataclass(frozen=True)
class Features:
    """taps [T, n_taps*H] and last [T, H] (after the final norm), in the target's dtype."""

    taps: Tensor
    last: Tensor


class Taps:
    """Context manager that keeps the outputs of the tapped decoder layers of one forward."""

    def __init__(self, model: "PreTrainedModel", taps: Sequence[int]):
        self.layers: list[nn.Module] = [backbone(model).layers[i] for i in taps]
        self.outputs: list[Tensor] = []

    def __enter__(self) -> "Taps":
        self.handles = [layer.register_forward_hook(self._keep) for layer in self.layers]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self.handles:
            handle.remove()

    def joined(self) -> Tensor:
        """[B, T, n_taps*H] of the forward that ran inside."""
        return torch.cat(self.outputs, dim=-1)

    def _keep(self, module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        self.outputs.append(output if isinstance(output, Tensor) else output[0])


def backbone(model: "PreTrainedModel") -> Any:
    """The decoder without its head: `.layers`, called with input_ids."""
    return model.model


def common_prefix(batch: Sequence[Sequence[int]]) -> int:
    """Length of the longest prefix of all sequences that leaves each at least one token."""
    if len(batch) < 2:
        return 0
    first, last = min(map(list, batch)), max(map(list, batch))
    shortest = min(len(ids) for ids in batch)
    return next((i for i in range(shortest - 1) if first[i] != last[i]), shortest - 1)


def load_target(folder: str | os.PathLike, dtype: torch.dtype, device: str = "cpu") -> Target:
    """Load a frozen target in eval mode on `device`. ValueError if the folder cannot be loaded."""
    from transformers import AutoModelForCausalLM

    _borrowed(folder)  # raises for a missing head; Transformers would warn and invent one
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, device_map=device, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"cannot load the target in {folder}: {error}") from error
    model: Any = model.eval().requires_grad_(False)
    return Target(
        model=model,
        dtype=dtype,
        embedding=model.get_input_embeddings().weight,
        head=model.get_output_embeddings().weight,
        num_layers=model.config.num_hidden_layers,
    )


def load_borrowed(folder: str | os.PathLike, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Only what a drafter borrows: (embedding [V, H], head [V, H]), one tensor where they are tied.

    Reads these tensors alone, because training and replay need no more of the target. They are
    those of `load_target`, bit for bit. Raises ValueError for a layout that is unknown, not
    complete, or that engines read in different ways.
    """
    embedding, head = _borrowed(folder)
    embedding = embedding.to(dtype)
    return embedding, embedding if head is None else head.to(dtype)


def _borrowed(folder: str | os.PathLike) -> tuple[Tensor, Tensor | None]:
    """Embedding and head as they are stored; None for a head that is the embedding."""
    read, tied = open_tensors(folder), ties_embeddings(folder)
    embedding, head = read(EMBEDDING), read(HEAD)
    if embedding is None:
        raise ValueError(f"{folder} has no tensor {EMBEDDING}: unknown layout")
    if tied and head is not None and not torch.equal(head, embedding):
        raise ValueError(
            f"{folder}: config.json ties the head to the embedding, but the weights have another "
            f"{HEAD}, and engines differ about which one counts: set tie_word_embeddings to false "
            "to keep it, or remove it from the weights"
        )
    if not tied and head is None:
        raise ValueError(
            f"{folder}: config.json does not tie the head to the embedding, and the weights have "
            f"no {HEAD}: fetch what is missing, or set tie_word_embeddings to true if the model "
            "was trained so (a quantised head is not supported)"
        )
    return embedding, None if tied else head


def ties_embeddings(folder: str | os.PathLike) -> bool:
    """Whether the embedding is the head: what config.json says, else its architecture's default
    (Gemma ties, Llama does not), as Transformers 5.19 and vLLM 0.32 read it.
    """
    config = read_target_config(folder)
    if "tie_word_embeddings" not in config:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(str(folder), local_files_only=True).to_dict()
    return bool(config.get("tie_word_embeddings"))


def read_target_config(folder: str | os.PathLike) -> dict[str, Any]:
    """A target's config.json. Raises ValueError if the folder holds no model, one without a key of
    NEEDED, or a multimodal one, whose decoder is described in its `text_config`.
    """
    model_files(folder)
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): fetch it again") from error
    if "text_config" in config and "num_hidden_layers" not in config:
        raise ValueError(
            f"{path}: {config.get('model_type')} keeps its decoder in text_config, which is not "
            "supported: choose a text-only target"
        )
    missing = [name for name in NEEDED if config.get(name) is None]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}: this kind of model is not supported")
    for name in NEEDED:
        if type(config[name]) is not int and name != "rms_norm_eps":
            raise ValueError(f"{path}: {name} is {config[name]!r}, not a whole number: repair it")
    if not isinstance(config.get("rope_parameters") or {}, dict):
        raise ValueError(f"{path}: rope_parameters is no object: repair it")
    return config


def open_tensors(folder: str | os.PathLike) -> Callable[[str], Tensor | None]:
    """A function that reads one tensor of a safetensors folder by its name; it returns None for an
    absent name. The folder may hold one file or many, with an index or without. Raises ValueError
    for files that are missing, damaged or contradictory.
    """
    where = tensor_files(folder)

    def read(name: str) -> Tensor | None:
        if name not in where:
            return None
        with _opened(where[name]) as file:
            return file.get_tensor(name)

    return read


def tensor_files(folder: str | os.PathLike) -> dict[str, Path]:
    """The file of each tensor, from the index if there is one, else from the files' headers.

    Raises ValueError as `open_tensors`.
    """
    folder = Path(folder)
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.is_file():
        files = [single] if single.is_file() else sorted(folder.glob("[!.]*.safetensors"))
        found = {}
        for path in files:
            with _opened(path) as file:
                found |= dict.fromkeys(file.keys(), path)
        return found
    try:
        names = json.loads(index.read_bytes())["weight_map"]
        where = {name: folder / file for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged ({error!r}): fetch it again") from error
    missing = sorted({path.name for path in where.values() if not path.is_file()})
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)} of its index: fetch what is missing")
    if single.is_file() and single not in where.values():
        raise ValueError(
            f"{folder} has {single.name} beside an index of other files, and engines differ about "
            "which of them they load: remove one"
        )
    return where


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): fetch it again") from error
