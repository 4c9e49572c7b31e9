"""Checks of a drafter folder that need no engine.

vLLM loads most wrong folders without an error: a missing tensor is served as uninitialised memory,
a mask token id is not checked, too few positions stop drafting for whole batches. So each rule for
a folder (a clause) is a check of `flywheel preflight`.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from safetensors import safe_open

from dflash.checkpoint import LM_HEAD, WEIGHTS, drafter_sha256, load_drafter, read_config
from dflash.drafter_config import PLAIN_KEYS, DrafterConfig
from dflash.identity import legacy_target_id, target_id
from dflash.target_model import EMBEDDING, load_borrowed, open_tensors
from jobs.base.checks import Check
from jobs.base.config import Config
from jobs.base.devices import dtype_name
from jobs.base.drafter_shape import taken_tokens
from jobs.base.target_facts import end_tokens, target_tokenizer
from jobs.dataset.samples import features_place, selected, targets_of_traffic, with_tokens
from serving.start_checks import check_drafter
from store.place import read_json

ARCHITECTURE = "DFlashDraftModel"
OURS_ALONE = ("block_size", "num_target_layers")  # no engine reads them
OVERRIDES = ("quantization_config", "eagle_aux_hidden_state_layer_ids")


@dataclass(frozen=True)
class Subject:
    """A drafter folder, its config.json raw and parsed, and the configuration to serve it with."""

    cfg: Config
    folder: Path
    raw: dict[str, Any]
    shape: DrafterConfig


def check_folder(cfg: Config, folder: Path) -> list[Check]:
    """The checks of all clauses. If config.json cannot be read, that is the only check."""
    try:
        shape = read_config(folder)
    except ValueError as error:
        fix = "export the drafter again, or write what it was trained with into its config.json"
        return [Check("config", str(error), "fail", fix)]
    subject = Subject(cfg, folder, json.loads((folder / "config.json").read_text()), shape)
    return [check for clause in CLAUSES for check in _look(clause, subject)]


def _look(clause: Callable[[Subject], Iterator[Check]], subject: Subject) -> list[Check]:
    """The faults and warnings of one clause; without any, the check that says what was found."""
    try:
        found = list(clause(subject))
    except (ValueError, OSError) as error:
        name = clause.__name__.replace("_", " ")
        return [Check(name, str(error), "fail", "the message says what to do")]
    return [check for check in found if check.status != "ok"] or found


def config(subject: Subject) -> Iterator[Check]:
    """Transformers, through which vLLM reads config.json, must get the same values as replay."""
    from transformers import AutoConfig  # as in dflash/target_model.py

    theirs = AutoConfig.from_pretrained(subject.folder)
    for name in [name for name in PLAIN_KEYS if name not in OURS_ALONE]:
        value = theirs.rope_parameters[name] if name == "rope_theta" else getattr(theirs, name)
        ours = getattr(subject.shape, name)
        if value != ours:
            found = f"{name} is {value} for Transformers and vLLM, {ours} for replay"
            fix = "config.json says it in two places: leave the one it was trained with"
            yield Check("config", found, "fail", fix)
    if subject.raw.get("architectures") != [ARCHITECTURE]:
        found = f"architectures is {subject.raw.get('architectures')}: vLLM loads another model"
        yield Check("config", found, "fail", f'write "architectures": ["{ARCHITECTURE}"]')
    for name in [name for name in OVERRIDES if subject.raw.get(name) is not None]:
        found = f"{name} is set: vLLM obeys it, replay does not"
        yield Check("config", found, "fail", f"remove {name} from config.json")
    rope = f"RoPE base {subject.shape.rope_theta:g}, plain"
    yield Check("config", f"{rope}, read alike by Transformers, vLLM and replay")


def tensors(subject: Subject) -> Iterator[Check]:
    """Tensors must have the exact names and shapes and be finite, and no other file may replace
    them.
    """
    again = "export the drafter again; vLLM serves a missing tensor as uninitialised memory"
    try:
        drafter = load_drafter(subject.folder)
    except ValueError as error:
        yield Check("tensors", str(error), "fail", again)
        return
    state = drafter.state_dict()
    broken = [name for name, tensor in state.items() if not bool(tensor.isfinite().all())]
    if broken:
        fix = "train again, or export a better step"
        yield Check("tensors", f"not finite: {', '.join(broken[:3])}", "fail", fix)
    others = [p.name for p in subject.folder.glob("*.safetensors") if p.name != WEIGHTS]
    if others:
        fix = "remove them: vLLM loads what it finds, replay does not"
        yield Check("tensors", f"beside {WEIGHTS}: {', '.join(others)}", "fail", fix)
    yield from _borrowed(subject)
    weights = [t for t in _stored(subject.folder).values() if t.is_floating_point()]
    dtypes = Counter(str(t.dtype).removeprefix("torch.") for t in weights)
    declared = subject.raw.get("dtype") or subject.raw.get("torch_dtype")
    if set(dtypes) != {declared}:
        fix = "export in one dtype and write it as dtype"
        found = f"stored as {dict(dtypes)}, config.json says {declared}"
        yield Check("tensors", found, "warn", fix)
    yield Check("tensors", f"{len(state)} tensors, {declared}, served in {dtype_name(subject.cfg)}")


def _stored(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _borrowed(subject: Subject) -> Iterator[Check]:
    """A stored copy of the target's embedding or head must equal it: vLLM would use the copy."""
    stored, folder = _stored(subject.folder), subject.cfg.target_path
    for place, name in enumerate(("embed_tokens.weight", LM_HEAD)):
        if name not in stored:
            continue
        own = load_borrowed(folder, stored[name].dtype)[place]
        if name == LM_HEAD and subject.shape.draft_vocab_size:
            own = own[load_drafter(subject.folder).draft_head(own)[0]]
        if not torch.equal(own, stored[name]):
            found = f"{name} is not the target's, and vLLM would use it"
            fix = f"remove {name} from {WEIGHTS}: the target's is used then, as in replay"
            if subject.shape.draft_vocab_size and name == LM_HEAD:
                fix = "serve the target it was trained for, or export the drafter again"
            yield Check("tensors", found, "fail", fix)


def target(subject: Subject) -> Iterator[Check]:
    """The target must be the one that was harvested and evaluated (weights, configs, tokenizer,
    template), with an embedding and head that can be borrowed.
    """
    cfg, identity = subject.cfg, target_id(subject.cfg.target_path)
    load_borrowed(cfg.target_path, torch.bfloat16)
    former = legacy_target_id(cfg.target_path)
    known = targets_of_traffic(cfg)
    if not known[identity]:
        seen = ", ".join(known) or "nothing"
        fix = "serve the target that was harvested, or ingest, harvest and train for this one"
        if known[former]:
            fix = f"{former} is this folder's former id: ingest, harvest and evaluate again"
        yield Check("target", f"{identity} is to be served, traffic/ is of {seen}", "fail", fix)
    name = f"{subject.folder.name}.json"
    evaluation = read_json(cfg.place("evaluations"), name, ["drafter_sha256", "target_id"]) or {}
    if evaluation.get("drafter_sha256") != drafter_sha256(subject.folder):
        fix = f"run `flywheel evaluate {subject.folder}`"
        yield Check(
            "target", "not evaluated: nothing says which target it was trained for", "warn", fix
        )
    elif evaluation["target_id"] != identity:
        fix = "serve that target, or train a drafter for this one"
        if evaluation["target_id"] == former:
            fix = "it is this folder's former id: ingest, harvest and evaluate again"
        yield Check(
            "target",
            f"evaluated with {evaluation['target_id']}, to be served with {identity}",
            "fail",
            fix,
        )
    yield Check("target", f"{identity}, {known[identity]} rows of traffic")


def taps(subject: Subject) -> Iterator[Check]:
    """The work folder must have features of the layers that the drafter reads."""
    cfg, ours = subject.cfg, subject.shape.target_layer_ids
    mine = pc.field("features_key") == features_place(cfg, ours).name
    if not any(len(b) for b in cfg.table("feature_index").batches(["sample_id"], mine)):
        fix = f"`flywheel harvest drafter.taps={','.join(map(str, ours))}`, or another drafter"
        found = f"target_layer_ids {list(ours)}: no features of these layers are harvested"
        yield Check("taps", found, "fail", fix)
    yield Check("taps", f"layers {list(ours)} of {subject.shape.num_target_layers}")


def mask_token(subject: Subject) -> Iterator[Check]:
    """The mask token must have a row in the embedding, and no other use: not in the chat template,
    not as another special token, not in traffic.
    """
    cfg, mask = subject.cfg, subject.shape.mask_token_id
    fix = "train with drafter.mask_token_id set to an unused special token"
    embedding = open_tensors(cfg.target_path)(EMBEDDING)
    if embedding is None or mask >= len(embedding):
        yield Check("mask token", f"id {mask} has no row in the target's embedding", "fail", fix)
    tokenizer = target_tokenizer(cfg)
    taken = taken_tokens(tokenizer) if tokenizer is not None else {}
    taken |= dict.fromkeys(end_tokens(cfg), "eos")
    if mask in taken:
        yield Check("mask token", f"id {mask} is the target's {taken[mask]} token", "fail", fix)
    rows, with_mask = selected(cfg), 0
    for batch in with_tokens(cfg, rows):
        lists = [batch["prompt_ids"], batch["output_ids"]]
        found = [pc.list_parent_indices(ids).filter(pc.equal(ids.flatten(), mask)) for ids in lists]  # pyright: ignore[reportAttributeAccessIssue]
        with_mask += len(pa.chunked_array(found).unique())
    if with_mask:
        yield Check(
            "mask token", f"id {mask} occurs in {with_mask} of {rows.num_rows} samples", "fail", fix
        )
    yield Check("mask token", f"id {mask}, in none of {rows.num_rows} samples")


def causality(subject: Subject) -> Iterator[Check]:
    """is_causal must be written, once: loaders disagree about a missing flag, and about which of
    two flags counts.
    """
    flag = subject.raw.get("is_causal")
    other = (subject.raw.get("dflash_config") or {}).get("causal")
    fix = 'write "is_causal": false (or true, as trained) into config.json, and no other flag'
    if flag is None:
        yield Check("causality", "is_causal is not written: loaders guess", "warn", fix)
    if other is not None and other != flag:
        found = f"is_causal is {flag}, dflash_config.causal is {other}: loaders differ"
        yield Check("causality", found, "fail", fix)
    yield Check("causality", f"is_causal: {flag}")


def length(subject: Subject) -> Iterator[Check]:
    """Shape, K and number of positions must pass the checks of `flywheel serve`."""
    serve = subject.cfg.serve
    k = max(check_drafter(subject.folder, subject.cfg.target_path, serve.k, serve.max_model_len))
    positions = subject.shape.max_position_embeddings
    yield Check("length", f"K = {k}, positions {positions} >= {serve.max_model_len} + {k}")


CLAUSES: list[Callable[[Subject], Iterator[Check]]] = [
    config,
    tensors,
    target,
    taps,
    mask_token,
    causality,
    length,
]
