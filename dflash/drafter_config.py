"""The shape of a drafter: one frozen dataclass, read from and written to z-lab's config.json."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash.config_formats import HEAD_KEYS, SLIDING, is_speculators


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """Everything that fixes a drafter's tensors and its arithmetic.

    Field names are the keys of config.json (Hugging Face Qwen3 names); `target_layer_ids`
    and `mask_token_id` live under its `dflash_config`. All layers have the same attention:
    `sliding_window` positions back (0: all), and later slots of the block unless `is_causal`.
    `draft_vocab_size` tokens can be drafted (0: all); the drafter's tensor d2t says which. The
    last four are DFlash 2's (dflash/block_conv.py, dflash/path_selector.py), all 0 without it.
    Raises ValueError for values that are out of range or do not fit together.
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
    sliding_window: int = 0
    is_causal: bool = False
    draft_vocab_size: int = 0
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0

    def __post_init__(self) -> None:
        check_taps(self.target_layer_ids, self.num_target_layers)
        if not 2 <= self.block_size <= 129:
            raise ValueError(f"block_size {self.block_size} is outside 2..129 (vLLM drafts 1..128)")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} has no embedding row: choose an unused id "
                f"below the vocabulary size {self.vocab_size}"
            )
        if not 0 <= self.draft_vocab_size < self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} is outside 0..{self.vocab_size - 1}: "
                "leave it out for a drafter of the whole vocabulary"
            )
        if 0 < self.sliding_window < self.block_size:
            raise ValueError(
                f"sliding_window {self.sliding_window} is smaller than block_size "
                f"{self.block_size}: vLLM's attention backends disagree there on what a slot sees "
                "of its own block; give it at least block_size, or 0 for no window"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        self._check_head()

    def _check_head(self) -> None:
        """Raise ValueError for an incomplete head of DFlash 2 or one that does not fit."""
        values = {name: getattr(self, name) for name in HEAD_KEYS}
        if not any(values.values()):
            return
        if min(values.values()) < 1:
            raise ValueError(f"a DFlash 2 drafter needs all of {', '.join(HEAD_KEYS)}: {values}")
        if self.draft_vocab_size:
            raise ValueError(
                "draft_vocab_size does not go with DFlash 2, which drafts from the whole "
                "vocabulary: leave it out (drafter.draft_vocab=0)"
            )
        if self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"conv_group_size {self.conv_group_size} does not divide hidden_size "
                f"{self.hidden_size}"
            )
        if self.selector_top_k > self.vocab_size:
            raise ValueError(
                f"selector_top_k {self.selector_top_k} is above vocab_size {self.vocab_size}"
            )

    @property
    def is_dflash2(self) -> bool:
        """Whether it has DFlash 2's convolutions and selector."""
        return self.selector_rank > 0

    @property
    def num_drafts(self) -> int:
        """K, the largest number of draft tokens: every slot but the anchor."""
        return self.block_size - 1

    def shape_fields(self) -> dict[str, Any]:
        """All fields by name; without those of DFlash 2 if it has none, so that hashes of plain
        drafters (compat key, names of runs) stay what they were.
        """
        skipped = () if self.is_dflash2 else HEAD_KEYS
        return {k: getattr(self, k) for k in self.__slots__ if k not in skipped}

    def to_json(self, dtype: str) -> dict[str, Any]:
        """The z-lab config.json that vLLM 0.32 and z-lab's client read."""
        return {
            "architectures": [ARCHITECTURES[self.is_dflash2]],
            "model_type": "qwen3",
            "dtype": dtype,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "layer_types": [SLIDING if self.sliding_window else FULL] * self.num_hidden_layers,
            "sliding_window": self.sliding_window or None,
            "use_sliding_window": self.sliding_window > 0,
            "is_causal": self.is_causal,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                **({k: getattr(self, k) for k in HEAD_KEYS} if self.is_dflash2 else {}),
            },
            **{name: getattr(self, name) for name in PLAIN_KEYS},
            **({"draft_vocab_size": self.draft_vocab_size} if self.draft_vocab_size else {}),
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "DrafterConfig":
        """Read a z-lab style config.json (ours or made elsewhere).

        Raises ValueError for a missing key, and for every option that changes the arithmetic and
        is not supported here (layers that differ, biases, scaled RoPE, ...).
        """
        _refuse_unsupported(raw)
        dflash = raw.get("dflash_config") or {}
        rope = raw.get("rope_parameters") or {}
        values = {"rope_theta": rope.get("rope_theta"), **raw, **dflash}
        needed = (*PLAIN_KEYS, *DFLASH_KEYS)
        if ARCHITECTURES[True] in (raw.get("architectures") or []):
            needed += HEAD_KEYS
        missing = [name for name in needed if values.get(name) is None]
        if missing:
            raise ValueError(f"not a DFlash drafter: its config.json lacks {', '.join(missing)}")
        taps = tuple(int(i) for i in values["target_layer_ids"])
        plain = {name: values[name] for name in PLAIN_KEYS}
        window, causal = _attention(raw)
        reduced = raw.get("draft_vocab_size") or raw["vocab_size"]
        if not isinstance(reduced, int):
            raise ValueError(f"draft_vocab_size is {reduced!r}, not a number of tokens")
        return cls(
            target_layer_ids=taps,
            mask_token_id=int(values["mask_token_id"]),
            sliding_window=window,
            is_causal=causal,
            draft_vocab_size=0 if reduced == raw["vocab_size"] else reduced,
            **{name: int(values.get(name) or 0) for name in HEAD_KEYS},
            **plain,
        )


ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")
"""Names in config.json, without and with DFlash 2's head."""
OTHER_HEADS = ("DSpark", "LiLiCorr", "Domino")
"""Heads of the same body that are not read here."""
DFLASH_KEYS = ("target_layer_ids", "mask_token_id")
PUBLISHED_HEAD = dict(zip(HEAD_KEYS, (2, 16, 256, 16), strict=True))
"""The sizes in all published DFlash 2 drafters."""
OPTIONAL_KEYS = ("sliding_window", "is_causal", "draft_vocab_size", *HEAD_KEYS)
PLAIN_KEYS = tuple(
    name for name in DrafterConfig.__slots__ if name not in (*DFLASH_KEYS, *OPTIONAL_KEYS)
)
FULL = "full_attention"


def head_name(fields: Mapping[str, Any]) -> str:
    """What people call the head of a drafter with these fields: DFlash or DFlash 2."""
    return "DFlash 2" if fields.get("selector_rank") else "DFlash"


def default_taps(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Evenly spaced layer ids, z-lab convention (id i = output of layer i = hidden_states[i+1]).

    `round(1 + i * (L - 4) / (n - 1))`; a single tap is L // 2. 24 layers, 5 taps: 1, 6, 11, 16, 21.
    """
    if num_taps == 1:
        return (num_layers // 2,)
    taps = tuple(round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps))
    check_taps(taps, num_layers)
    return taps


def check_taps(taps: tuple[int, ...], num_layers: int) -> None:
    """Raise ValueError unless the ids are strictly increasing and below the last layer.

    vLLM sorts and de-duplicates ids, so any other order would silently permute the features. The
    last layer is excluded because Transformers gives its output after the final norm.
    """
    if not taps or any(b <= a for a, b in itertools.pairwise(taps)):
        raise ValueError(f"target_layer_ids {list(taps)} must be strictly increasing")
    if taps[0] < 0 or taps[-1] > num_layers - 2:
        raise ValueError(
            f"target_layer_ids {list(taps)} must lie in 0..{num_layers - 2} "
            f"for a target of {num_layers} layers"
        )


NEUTRAL: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "attention_value_scale": None,
    "use_swa": False,
    "partial_rotary_factor": 1.0,
    "is_neox_style": True,
    "input_embedding_scale": 1.0,
    "logit_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "sample_from_anchor": False,
    "use_aux_hidden_state": True,
}
"""Options that vLLM or z-lab's client read, each with the only value that is supported here."""


def _attention(raw: dict[str, Any]) -> tuple[int, bool]:
    """(sliding window or 0, causal) as vLLM 0.32 and z-lab's client resolve them.

    Causal is `is_causal`, else `dflash_config.causal`, else true for sliding layers and false for
    full ones. The window is `dflash_config.swa_window_size`, else `sliding_window`. The latter
    counts only with `use_sliding_window`, because Qwen3's config drops it otherwise.
    """
    dflash = raw.get("dflash_config") or {}
    kinds = set(raw.get("layer_types") or [FULL])
    if kinds not in ({FULL}, {SLIDING}):
        raise ValueError(
            f"layer_types are {', '.join(sorted(kinds))}: only drafters whose layers all attend "
            "alike are supported (vLLM's V1 runner serves no other)"
        )
    causal = next(
        (c for c in (raw.get("is_causal"), dflash.get("causal")) if c is not None),
        kinds == {SLIDING},
    )
    if kinds == {FULL}:
        return 0, bool(causal)
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    window = dflash.get("swa_window_size", window)
    if not window:
        raise ValueError(
            "layer_types are sliding_attention without a window: set sliding_window and "
            "use_sliding_window: true"
        )
    return int(window), bool(causal)


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    if is_speculators(raw):
        raise ValueError(
            "this drafter is in speculators' format: train.base reads it, everything else needs "
            "z-lab's; `flywheel convert convert.source=FOLDER convert.dest=NEW` writes that"
        )
    named = "".join(map(str, raw.get("architectures") or []))
    other = next((head for head in OTHER_HEADS if head.lower() in named.lower()), None)
    if other:
        raise ValueError(
            f"this is a {other} drafter ({named}): its head is not read here. DFlash and DFlash 2 "
            "drafters are replayed, trained and served; vLLM's V2 runner serves the others on a GPU"
        )
    dflash = raw.get("dflash_config") or {}
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    asked = [
        f"{name} = {source[name]}"
        for name, neutral in NEUTRAL.items()
        for source in (raw, dflash, rope)
        if source.get(name) not in (None, neutral)
    ]
    if rope.get("rope_type", "default") != "default":
        asked.append(f"scaled RoPE ({rope['rope_type']})")
    if raw.get("target_hidden_size") not in (None, raw.get("hidden_size")):
        asked.append(f"target_hidden_size = {raw['target_hidden_size']}")
    if asked:
        raise ValueError(f"drafter config.json asks for {', '.join(asked)}: not supported")
