"""The shape of a drafter: one frozen dataclass, read from and written to z-lab's config.json."""

import itertools
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """Everything that fixes a drafter's tensors and its arithmetic.

    Field names are the keys of config.json (Hugging Face Qwen3 names); `target_layer_ids`
    and `mask_token_id` live under its `dflash_config`.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    block_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int

    def __post_init__(self) -> None:
        check_taps(self.target_layer_ids, self.num_target_layers)
        if not 2 <= self.block_size <= 129:
            raise ValueError(f"block_size {self.block_size} is outside 2..129 (vLLM drafts 1..128)")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} has no embedding row: choose an unused id "
                f"below the vocabulary size {self.vocab_size}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )

    @property
    def num_drafts(self) -> int:
        """K, the largest number of draft tokens: every slot but the anchor."""
        return self.block_size - 1

    def to_json(self, dtype: str) -> dict[str, Any]:
        """The z-lab config.json that vLLM 0.32 and z-lab's client read."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "dtype": dtype,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "sliding_window": None,
            "use_sliding_window": False,
            "is_causal": False,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            **{name: getattr(self, name) for name in PLAIN_KEYS},
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "DrafterConfig":
        """Read a z-lab style config.json (ours or made elsewhere).

        Raises ValueError for a missing key and for every option that changes the arithmetic
        and that this code does not have (causal blocks, sliding layers, biases, scaled RoPE).
        """
        _refuse_unsupported(raw)
        dflash = raw.get("dflash_config") or {}
        rope = raw.get("rope_parameters") or {}
        values = {"rope_theta": rope.get("rope_theta"), **raw, **dflash}
        missing = [name for name in (*PLAIN_KEYS, *DFLASH_KEYS) if values.get(name) is None]
        if missing:
            raise ValueError(f"not a DFlash drafter: its config.json lacks {', '.join(missing)}")
        taps = tuple(int(i) for i in values["target_layer_ids"])
        plain = {name: values[name] for name in PLAIN_KEYS}
        return cls(target_layer_ids=taps, mask_token_id=int(values["mask_token_id"]), **plain)


DFLASH_KEYS = ("target_layer_ids", "mask_token_id")
PLAIN_KEYS = tuple(name for name in DrafterConfig.__slots__ if name not in DFLASH_KEYS)


def default_taps(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Evenly spaced layer ids, z-lab convention (id i = output of layer i = hidden_states[i+1]).

    `round(1 + i * (L - 4) / (n - 1))`, one tap is L // 2; 24 layers, 5 taps: 1, 6, 11, 16, 21.
    """
    if num_taps == 1:
        return (num_layers // 2,)
    taps = tuple(round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps))
    check_taps(taps, num_layers)
    return taps


def check_taps(taps: tuple[int, ...], num_layers: int) -> None:
    """Raise ValueError unless the ids are strictly increasing and below the last layer.

    vLLM sorts and de-duplicates ids, so any other order would silently permute the features;
    the last layer's output is not the same tensor in Transformers (after the final norm).
    """
    if not taps or any(b <= a for a, b in itertools.pairwise(taps)):
        raise ValueError(f"target_layer_ids {list(taps)} must be strictly increasing")
    if taps[0] < 0 or taps[-1] > num_layers - 2:
        raise ValueError(
            f"target_layer_ids {list(taps)} must lie in 0..{num_layers - 2} "
            f"for a target of {num_layers} layers"
        )


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    if "speculators_model_type" in raw:
        raise ValueError("this is a speculators-format drafter; only z-lab style folders are read")
    dflash = raw.get("dflash_config") or {}
    causal = raw.get("is_causal", dflash.get("causal", False))
    kinds = set(raw.get("layer_types") or ["full_attention"])
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    refused = {
        "is_causal": causal,
        "layer_types other than full_attention": kinds != {"full_attention"},
        "attention_bias": raw.get("attention_bias"),
        "hidden_act other than silu": raw.get("hidden_act", "silu") != "silu",
        "scaled RoPE": rope.get("rope_type", "default") != "default",
        "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0) != 1.0
        or rope.get("partial_rotary_factor", 1.0) != 1.0,
        "input_embedding_scale": raw.get("input_embedding_scale", 1.0) != 1.0,
    }
    named = [name for name, present in refused.items() if present]
    if named:
        raise ValueError(f"drafter config.json asks for {', '.join(named)}: not supported")
