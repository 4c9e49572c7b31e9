"""The DFlash drafter: a small Qwen3-style decoder with target features injected into every layer.

Shape suffixes: B sequences, T context positions, N blocks, S slots of a block, H hidden,
D head size. One forward fills all slots of all blocks (paper, section 3).
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from dflash.block_conv import BlockConv
from dflash.drafter_config import DrafterConfig
from dflash.mask import dense_mask, flex_mask
from dflash.path_selector import PathSelector

FINAL_NORM = 0.3
"""Initial weight of the final norm. At 1, the logits of an untrained drafter are large, and the
first steps only shrink them (docs/decisions/007)."""

ROWS_PER_CHUNK = 128
"""Drafts that are compared with the whole vocabulary at a time."""

ContextKV = list[tuple[Tensor, Tensor]]
"""Per layer the context keys and values, each [B, kv_heads, T, D]."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 (Qwen3, Llama)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Queries from the block; keys and values from [context ; block] with the same projections."""

    def __init__(self, cfg: DrafterConfig):
        super().__init__()
        self.head_dim = cfg.head_dim
        heads, kv_heads = (
            cfg.num_attention_heads * cfg.head_dim,
            cfg.num_key_value_heads * cfg.head_dim,
        )
        self.q_proj = nn.Linear(cfg.hidden_size, heads, bias=False)
        self.k_proj = nn.Linear(cfg.hidden_size, kv_heads, bias=False)
        self.v_proj = nn.Linear(cfg.hidden_size, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, cfg.hidden_size, bias=False)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps)
        self.k_norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps)

    def keys_values(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """X [B, L, H] -> normed and rotated keys, values: [B, kv_heads, L, D]."""
        key = rotate(self.k_norm(self._split(self.k_proj(x))), rope)
        return key, self._split(self.v_proj(x))

    def forward(self, x: Tensor, rope: Tensor, context: tuple[Tensor, Tensor], mask) -> Tensor:
        query = rotate(self.q_norm(self._split(self.q_proj(x))), rope)
        key, value = self.keys_values(x, rope)
        key = torch.cat([context[0], key], dim=2)
        value = torch.cat([context[1], value], dim=2)
        if isinstance(mask, Tensor):
            out = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        else:
            out = fused_flex()(query, key, value, block_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, cfg: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.up_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm decoder layer; `input_layernorm` acts on the block only, never on the context.

    DFlash 2 has a convolution around each of its two sublayers.
    """

    def __init__(self, cfg: DrafterConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = MLP(cfg)
        if cfg.is_dflash2:
            self.attention_conv = BlockConv(cfg)
            self.mlp_conv = BlockConv(cfg)
        self.is_dflash2 = cfg.is_dflash2

    def context(self, shared: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the context. A method of the layer, because FSDP gathers by layer."""
        return self.self_attn.keys_values(shared, rope)

    def forward(
        self, x: Tensor, rope: Tensor, context: tuple[Tensor, Tensor], mask, slots: int
    ) -> Tensor:
        attend = partial(self.self_attn, rope=rope, context=context, mask=mask)
        if not self.is_dflash2:
            x = x + attend(self.input_layernorm(x))
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.attention_conv(self.input_layernorm(x), slots, attend)
        return x + self.mlp_conv(self.post_attention_layernorm(x), slots, self.mlp)


class Drafter(nn.Module):
    """The drafter without embedding and head, which it borrows from the target.

    With a reduced vocabulary, it holds its rows of the head, which are never trained, and their
    token ids (dflash/vocabulary.py). DFlash 2 has a selector (dflash/path_selector.py). Its state
    dict is exactly what a drafter folder holds.
    """

    def __init__(self, cfg: DrafterConfig):
        super().__init__()
        self.cfg = cfg
        self.fc = nn.Linear(
            len(cfg.target_layer_ids) * cfg.hidden_size, cfg.hidden_size, bias=False
        )
        self.hidden_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.layers: Any = nn.ModuleList(Layer(cfg) for _ in range(cfg.num_hidden_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        if size := cfg.draft_vocab_size:
            self.lm_head: Any = nn.Module()
            self.lm_head.register_buffer("weight", torch.zeros(size, cfg.hidden_size))
            self.d2t: Tensor
            self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))
        self.candidate_selector = PathSelector(cfg) if cfg.is_dflash2 else None

    def context(self, features_BTF: Tensor, start: int = 0) -> ContextKV:
        """Keys and values of the context positions start..start+T-1, once per sequence.

        features_BTF [B, T, n_taps*H]: `hidden_norm(fc(features))` is shared by all layers.
        """
        shared = self.hidden_norm(self.fc(features_BTF))
        positions = torch.arange(start, start + features_BTF.shape[1], device=shared.device)
        rope = self._rope(positions[None])
        return [layer.context(shared, rope) for layer in self.layers]

    def forward(
        self,
        context: ContextKV,
        embeds_BNSH: Tensor,
        anchors_BN: Tensor,
        starts_BN: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, N, S, H] of all slots, ready for the target's head.

        embeds_BNSH: target embeddings of [anchor token, mask, ..., mask]; anchors_BN int64: place
        of each anchor in its row. Slot k predicts the token at anchor + k; slot 0's output is
        unused. A padded block may carry any anchor; its rows are dropped later. starts_BN int64:
        where the documents of the blocks start, if a row holds several. Places in a row serve as
        positions, because rotary embeddings depend on differences only.
        """
        B, N, S, H = embeds_BNSH.shape
        num_context = context[0][0].shape[2]
        make_mask = flex_mask if embeds_BNSH.is_cuda and torch.is_grad_enabled() else dense_mask
        rule = (self.cfg.sliding_window, self.cfg.is_causal, starts_BN)
        mask = make_mask(anchors_BN, num_context, S, *rule)
        positions = anchors_BN[:, :, None] + torch.arange(S, device=anchors_BN.device)
        rope = self._rope(positions.flatten(1))
        x = embeds_BNSH.reshape(B, N * S, H)
        for layer, layer_context in zip(self.layers, context, strict=True):
            x = layer(x, rope, layer_context, mask, S)
        return self.norm(x).view(B, N, S, H)

    def draft_head(self, head_VH: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens that can be drafted, ids [D] int64 ascending, and the head's rows [D, H] for them.

        head_VH: the target's head.
        """
        if not self.cfg.draft_vocab_size:
            return torch.arange(len(head_VH), device=head_VH.device), head_VH
        ids = torch.arange(self.cfg.draft_vocab_size, device=head_VH.device) + self.d2t
        return ids, self.lm_head.weight.to(head_VH.dtype)

    def logits(self, hidden: Tensor, head_VH: Tensor) -> Tensor:
        """Hidden states [..., H] -> logits [..., V]; tokens that cannot be drafted get -inf."""
        ids, rows = self.draft_head(head_VH)
        logits = against(hidden, rows)
        if not self.cfg.draft_vocab_size:
            return logits
        whole = logits.new_full((*logits.shape[:-1], len(head_VH)), -torch.inf)
        return whole.index_copy_(-1, ids, logits)

    def scores(self, hidden: Tensor, head_VH: Tensor, previous: Tensor) -> Tensor:
        """What a slot drafts by: [..., V], from hidden [..., H] and the tokens before it [...].

        Without a selector these are the logits. Greedy drafting takes the argmax.
        """
        logits = self.logits(hidden, head_VH)
        if self.candidate_selector is None:
            return logits
        return self.candidate_selector.rescored(hidden, logits, previous)

    def rival_scores(self, hidden: Tensor, unary: Tensor, tokens: Tensor, previous: Tensor):
        """`PathSelector.scores`. A method of the drafter, because FSDP gathers for those."""
        assert self.candidate_selector is not None
        return self.candidate_selector.scores(hidden, unary, tokens, previous)

    def _rope(self, positions: Tensor) -> Tensor:
        """Positions [B, L] -> [2, B, 1, L, D]: cosines and sines, plain 1-D, float32."""
        dim = self.cfg.head_dim
        powers = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim
        angles = positions[:, None, :, None].float() * self.cfg.rope_theta**-powers
        angles = torch.cat([angles, angles], dim=-1)
        return torch.stack([angles.cos(), angles.sin()])


def new_drafter(cfg: DrafterConfig, seed: int) -> Drafter:
    """An untrained drafter: normal(0, 0.02) matrices, unit norms, the final one at FINAL_NORM.

    What DFlash 2 adds starts without effect. So a seed gives the same drafts with it and without.
    """
    drafter = Drafter(cfg)
    torch.nn.init.constant_(drafter.norm.weight, FINAL_NORM)
    draw = torch.Generator().manual_seed(seed)
    for name, param in drafter.named_parameters():
        if param.ndim == 2 and not in_head(name):
            torch.nn.init.normal_(param, std=0.02, generator=draw)
    for layer in drafter.layers if cfg.is_dflash2 else ():
        layer.attention_conv.start()
        layer.mlp_conv.start()
    if drafter.candidate_selector is not None:
        drafter.candidate_selector.start(draw)
    return drafter


def in_head(name: str) -> bool:
    """Whether the parameter of that name is one that DFlash 2 adds to a plain drafter."""
    return name.startswith("candidate_selector.") or "_conv." in name


def reshaped(base: Drafter, cfg: DrafterConfig, seed: int) -> Drafter:
    """A drafter of the shape `cfg` with the weights of `base`, which computes the same bit for bit.

    cfg: the base's, but its block size may differ, it may be DFlash 2's where the base is plain,
    and of the whole vocabulary where the base's is reduced (then tokens that the base could not
    draft may win). RuntimeError if the base's tensors do not fit it.
    """
    if cfg == base.cfg:
        return base
    state = new_drafter(cfg, seed).to(base.norm.weight.dtype).state_dict()
    own = base.state_dict()
    if base.cfg.draft_vocab_size and not cfg.draft_vocab_size:
        del own["lm_head.weight"], own["d2t"]
    return drafter_of(cfg, state | own)


def drafter_of(cfg: DrafterConfig, state: dict[str, Tensor]) -> Drafter:
    """A drafter around the tensors of `state`, which it shares. RuntimeError if they do not fit."""
    with torch.device("meta"):
        drafter = Drafter(cfg)
    drafter.load_state_dict(state, assign=True)
    return drafter


def accepted_drafts(
    drafter: Drafter, hidden_MKH: Tensor, head_VH: Tensor, tokens_MS: Tensor
) -> Tensor:
    """How many drafts of M blocks the target accepts greedily: int64 [M].

    tokens_MS: the target's tokens, of which the first is the anchor. A draft is accepted while it
    equals the target's token, and then those before it did so, too. So each slot is judged with the
    target's token before it: exact for any head, and without the drafts themselves.
    """

    def agree(hidden_MH: Tensor, before_M: Tensor, tokens_M: Tensor) -> Tensor:
        parts = (part.split(ROWS_PER_CHUNK) for part in (hidden_MH, before_M))
        found = [drafter.scores(h, head_VH, b).argmax(-1) for h, b in zip(*parts, strict=True)]
        return torch.cat(found) == tokens_M

    return accepted_prefix(hidden_MKH, tokens_MS, agree)


def accepted_prefix(
    hidden_MKH: Tensor, tokens_MS: Tensor, agree: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """How many drafts of M blocks agree before the first that does not: int64 [M].

    agree: from hidden states [m, H] of a slot, the tokens before it [m] and those at it [m] to bool
    [m]. It is asked only for blocks whose earlier slots all agree.
    """
    counts = torch.zeros_like(tokens_MS[:, 0])
    alive = torch.arange(len(counts), device=counts.device)
    for k in range(hidden_MKH.shape[1]):
        before, tokens = tokens_MS[alive, k : k + 2].unbind(1)
        alive = alive[agree(hidden_MKH[alive, k], before, tokens)]
        if not len(alive):
            break
        counts[alive] += 1
    return counts


@cache
def fused_flex() -> Any:
    """Flex attention compiled to one kernel: the eager one builds the whole score matrix. CUDA."""
    return torch.compile(flex_attention)


def against(hidden: Tensor, head: Tensor) -> Tensor:
    """Logits [..., C] of hidden states [..., H] against rows of a head [C, H], in their dtype.

    The product is of flattened rows: for a strided view of more dimensions, a bfloat16 product
    copies the head first (on a CPU six times slower, measured at 160 x 576 against 3,000 rows).
    """
    return (hidden.reshape(-1, hidden.shape[-1]) @ head.T).view(*hidden.shape[:-1], len(head))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary embedding, half-split (neox) layout: x [B, heads, L, D]."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


def block_embeds(
    embedding: Tensor, anchor_tokens_BN: Tensor, mask_token_id: int, slots: int
) -> Tensor:
    """Target embedding rows of [anchor, mask, ..., mask]: [B, N, slots, H]."""
    tokens = anchor_tokens_BN.new_full((*anchor_tokens_BN.shape, slots), mask_token_id)
    tokens[..., 0] = anchor_tokens_BN
    return F.embedding(tokens, embedding)
