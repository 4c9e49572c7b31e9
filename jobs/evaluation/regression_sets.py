"""Regression sets: answered by the target, then replayed with each drafter.

The target answers a set once, greedily; the answers are kept by content in
<work>/regression/answers. Their features are harvested like those of any selected sample, in the
work folder <work>/regression.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import torch
from tqdm import tqdm

from dflash.identity import target_id
from dflash.replay import length_groups, replay
from dflash.target_model import Target, load_target
from jobs.base.config import Config
from jobs.base.console import short_name
from jobs.base.devices import compute_device, compute_dtype, unfit
from jobs.base.target_facts import end_tokens, target_tokenizer
from jobs.dataset.samples import Requests, set_aside, with_features
from jobs.dataset.slices import Row
from jobs.evaluation.drafters import (
    Borrowed,
    Side,
)
from jobs.evaluation.prompt_files import Prompts, read_prompts
from jobs.evaluation.summaries import compare
from jobs.harvesting.missing_features import CHUNK, harvest_samples, show
from store.ids import sample_id, short_hash
from store.place import read_json, write_json
from store.schemas import TRAFFIC

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Sets:
    """Sets by name: rows and requests of the answered ones, and why the others were skipped."""

    answered: dict[str, tuple[list[Row], Requests]]
    skipped: dict[str, str]


def load_sets(cfg: Config) -> Sets:
    """Every set in evaluate.regression, answered and harvested. A set without kept answers is
    skipped if the target does not fit into memory.

    Raises ValueError for a file without a known shape (prompt_files.py), for two sets with the same
    name, and if too many answers are set aside.
    """
    sets = [read_prompts(s, cfg.evaluate.regression_prompts) for s in cfg.evaluate.regression]
    names = [prompts.name for prompts in sets]
    if len(set(names)) < len(names):
        raise ValueError(f"evaluate.regression: sets need different names, got {', '.join(names)}")
    inner = replace(
        cfg,
        work=str(cfg.place("regression")),
        scratch=str(cfg.path("regression")),
        target=replace(cfg.target, path=cfg.target.path or str(cfg.target_path)),
    )
    why = unfit(inner, compute_dtype(inner)) if sets else ""
    skipped = {p.name: why for p in sets if why and not kept(inner, p)}
    rows = {p.name: answered(inner, p) for p in sets if p.name not in skipped}
    if rows:
        every = {row["sample_id"]: row for more in rows.values() for row in more}
        ordered = [{name: every[key][name] for name in CHUNK} for key in sorted(every)]
        schema = pa.schema([TRAFFIC.field(name) for name in CHUNK])
        done = harvest_samples(
            inner, pa.Table.from_pylist(ordered, schema=schema), lambda rows: rows.to_batches()
        )
        show(done)
        done.check_rate(inner.harvest.max_reject_rate)
        aside = set_aside(inner)
        rows = {
            name: [r for r in more if r["sample_id"] not in aside] for name, more in rows.items()
        }
    return Sets({name: (r, with_features(inner, r)) for name, r in rows.items()}, skipped)


def answered(cfg: Config, prompts: Prompts) -> list[Row]:
    """The target's greedy answers as TRAFFIC rows, one per user turn.

    They are computed on the configured device in the configured dtype, and kept per dtype.
    """
    identity, dtype = target_id(cfg.target_path), compute_dtype(cfg)
    found = kept(cfg, prompts)
    if found is None:
        target = load_target(cfg.target_path, dtype, compute_device(cfg))
        turns = answer(cfg, target, prompts, cfg.evaluate.regression_tokens)
        made = {"target_id": identity, "dtype": str(dtype).removeprefix("torch."), "turns": turns}
        found = write_json(cfg.place("answers"), answers_file(cfg, prompts), made)
    return [traffic_row(identity, prompts.name, *turn) for turn in found["turns"]]


def kept(cfg: Config, prompts: Prompts) -> dict[str, Any] | None:
    """The kept answers to these prompts; None if there are none. Raises ValueError if they are
    damaged.
    """
    name = answers_file(cfg, prompts)
    return read_json(cfg.place("answers"), name, ["turns"], "remove it and evaluate again")


def answers_file(cfg: Config, prompts: Prompts) -> str:
    """Name of the answers of this target, dtype and length limit to these prompts."""
    made = [target_id(cfg.target_path), str(compute_dtype(cfg)), cfg.evaluate.regression_tokens]
    return f"{short_hash([*made, prompts.conversations])}.json"


def traffic_row(
    identity: str, name: str, conversation: int, prompt_ids: list[int], output_ids: list[int]
) -> Row:
    """One greedy answer as a TRAFFIC row of domain `name`."""
    end = len(prompt_ids) + len(output_ids)
    return dict.fromkeys(TRAFFIC.names) | {
        "sample_id": sample_id(identity, prompt_ids, output_ids),
        "conversation_id": f"{name}-{conversation}",
        "split": "test",
        "domain": name,
        "source": "regression",
        "captured_at": datetime(1970, 1, 1, tzinfo=UTC),
        "target_id": identity,
        "prompt_ids": prompt_ids,
        "output_ids": output_ids,
        "loss_mask": [{"start": len(prompt_ids), "end": end}],
        "ids_source": "regenerated",
        "temperature": 0.0,
        "shaped": "",
        "repeat_count": 1,
    }


Turn = tuple[int, list[int], list[int]]
"""Index of the conversation, prompt ids, output ids."""


def answer(cfg: Config, target: Target, prompts: Prompts, longest: int) -> list[Turn]:
    """Answer every turn in order: the prompt of a later turn has the answers to earlier ones.

    Raises ValueError for a target without a tokenizer.
    """
    tokenizer = target_tokenizer(cfg)
    if tokenizer is None:
        raise ValueError(
            f"{cfg.target_path} has no tokenizer, which evaluate.regression needs to read prompts"
        )
    chats: list[list[Message]] = [[] for _ in prompts.conversations]
    found: list[Turn] = []
    most = max(map(len, prompts.conversations))
    for turn in range(most):
        asked = [i for i, turns in enumerate(prompts.conversations) if turn < len(turns)]
        for i in asked:
            chats[i].append({"role": "user", "content": prompts.conversations[i][turn]})
        ids = [render(tokenizer, chats[i]) for i in asked]
        label = f"{prompts.name}, turn {turn + 1} of {most}"
        for i, prompt, output in zip(
            asked, ids, generate(cfg, target, ids, longest, label), strict=True
        ):
            text = tokenizer.decode(output, skip_special_tokens=True)
            chats[i].append({"role": "assistant", "content": text})
            found.append((i, prompt, output))
    return found


def render(tokenizer: Any, messages: list[Message]) -> list[int]:
    """Token ids of a prompt: by the target's chat template, or of the plain text without one."""
    if tokenizer.chat_template:
        return list(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        )
    return list(tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"])


@torch.inference_mode()
def generate(
    cfg: Config, target: Target, prompts: Sequence[list[int]], longest: int, label: str
) -> list[list[int]]:
    """Greedy answers of at most `longest` tokens, up to and including the end-of-text token."""
    from transformers import GenerationConfig

    ends = end_tokens(cfg)
    # A fresh config: the folder's own may ask for sampling or penalties.
    model: Any = target.model
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=longest, eos_token_id=ends, pad_token_id=ends[0]
    )
    outputs: list[list[int]] = [[] for _ in prompts]
    lengths = [len(ids) + longest for ids in prompts]
    with tqdm(total=len(prompts), desc=short_name(label), unit="answer") as bar:
        for group in length_groups(lengths, cfg.harvest.batch_tokens):
            widest = max(len(prompts[i]) for i in group)
            ids = torch.tensor([[ends[0]] * (widest - len(prompts[i])) + prompts[i] for i in group])
            mask = torch.tensor(
                [[0] * (widest - len(prompts[i])) + [1] * len(prompts[i]) for i in group]
            )
            made = model.generate(
                ids.to(target.embedding.device),
                attention_mask=mask.to(target.embedding.device),
                generation_config=settings,
            )
            for i, row in zip(group, made[:, widest:].tolist(), strict=True):
                outputs[i] = row[: _end(row, ends)]
            bar.update(len(group))
    return outputs


def _end(row: list[int], ends: Sequence[int]) -> int:
    """Number of tokens up to and including the first end-of-text token."""
    return next((i + 1 for i, token in enumerate(row) if token in ends), len(row))


def regression(cfg: Config, sides: Sequence[Side], borrowed: Borrowed) -> dict[str, Any]:
    """Compare the sides on every set of evaluate.regression, each with the features of its own
    taps. `regression_skipped` says why a set was not compared.
    """
    sets = {
        taps: load_sets(cfg.override("drafter", taps=list(taps)))
        for taps in dict.fromkeys(side.taps for side in sides)
    }
    found, skipped = {}, dict(sets[sides[0].taps].skipped)
    for name in sets[sides[0].taps].answered:
        walked: list[dict[tuple[str, str], tuple[Row, list[int]]]] = []
        for side in sides:
            rows, asked = sets[side.taps].answered[name]
            walks = replay(side.drafter, *borrowed, asked, side.k)
            keys = [(row["conversation_id"], row["sample_id"]) for row in rows]
            walked.append(dict(zip(keys, zip(rows, walks, strict=True), strict=True)))
        both = [key for key in walked[0] if all(key in other for other in walked)]
        walks = [[one[key][1] for key in both] for one in walked]
        if not any(walks[0]):
            skipped[name] = (
                "every answer is a single token, so there is no round"
                if both
                else "harvest set all of its answers aside"
            )
            continue
        rows = [walked[0][key][0] for key in both]
        found[name] = compare(cfg, rows, sides, walks, len(sets[sides[0].taps].answered))
    return {"regression": found, "regression_skipped": skipped}
