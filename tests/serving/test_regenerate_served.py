"""A changed target answers the prompts of its former versions: real vLLM, real ingest."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dflash.decode import decode
from dflash.identity import target_id
from dflash.target_model import load_target
from jobs import ingest, regenerate
from jobs.base.config import load
from jobs.regeneration import answer_places, kept_tokenizers
from tests.helpers.capture_logs import line, write_log
from tests.serving.conftest import VOCABULARY

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("ray_cluster"),
]
TEMPLATE = (
    "{% for m in messages %}{{ 'w3 ' if m.role == 'user' else 'w4 ' }}{{ m.content }} w5 "
    "{% endfor %}w6"
)
NEW_TEMPLATE = TEMPLATE.replace("w3 ", "w7 w8 ")
LONGEST = 60


def former_target(folder, tiny_target, seed, template):
    """Other weights, and this chat template."""
    shutil.copytree(tiny_target, folder)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return with_template(folder, template)


def with_template(folder, template):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


PROMPTS = {f"same{i}": [7, 8, 20 + i, 5, 6] for i in range(4)}
PROMPTS |= {f"other{i}": [3, 40 + i, 5, 6] for i in range(3)}
PROMPTS |= {"tools": [9, 9, 3, 50, 5, 6], "long": [*[60] * 127]}
"""Prompts by conversation; the first four letters are the domain."""


TEXT = [
    {"role": "user", "content": "w30"},
    {"role": "assistant", "content": "w31"},
    {"role": "user", "content": "w32"},
]
"""A conversation of a text log: two prompts."""


def configure(folder, target):
    settings = [f"work={folder / 'work'}", f"target.path={target}"]
    settings += ["serve.max_model_len=128", "serve.max_num_seqs=8", "serve.kv_cache_gib=1"]
    return load(None, [*settings, f"regenerate.max_tokens={LONGEST}"])


def ingest_former(folder, tiny_target):
    """What two former targets answered: one with the present template, one with another."""
    same = former_target(folder / "same", tiny_target, 1, NEW_TEMPLATE)
    other = former_target(folder / "other", tiny_target, 2, TEMPLATE)
    for target, names in ((same, ("same", "long")), (other, ("other", "tools"))):
        told = {"target_id": target_id(target), "output_ids": [90, 91, 1], "tenant": "acme"}
        lines = [
            line(i, prompt_ids=ids, conversation_id=name, domain=name[:4], **told)
            for i, (name, ids) in enumerate(PROMPTS.items())
            if name.startswith(names)
        ]
        warm = {"temperature": 0.8, "top_p": 0.9, "seed": 5}
        lines[0] = json.dumps(json.loads(lines[0]) | warm) + "\n"
        cfg = configure(folder, target)
        write_log(cfg, f"{target.name}.jsonl", lines)
        ingest.run(cfg)


def test_a_new_target_answers_the_prompts_of_former_ones(tmp_path, tiny_target, monkeypatch):
    present = with_template(shutil.copytree(tiny_target, tmp_path / "new"), NEW_TEMPLATE)
    ingest_former(tmp_path, tiny_target)
    cfg = configure(tmp_path, present)
    write_log(
        cfg, "texts.jsonl", [json.dumps({"messages": TEXT, "domain": "text", "consent": True})]
    )
    ingest.run(cfg)
    assert len(regenerate.plan(cfg)["domains"]) == 5

    # Interrupted after its first batch, it goes on with the rest.
    monkeypatch.setattr(regenerate, "BATCH", 3)
    real, asked = regenerate.complete_each, []

    def killed_later(url, requests, *more):
        asked.append(len(requests))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(url, requests, *more)

    monkeypatch.setattr(regenerate, "complete_each", killed_later)
    with pytest.raises(KeyboardInterrupt):
        regenerate.run(cfg)
    done = regenerate.run(cfg)
    assert asked == [3, 3, 3, 3]
    assert done["answers"] == 6
    assert regenerate.run(cfg)["prompts"] == 0
    place = answer_places.left_out(cfg)
    left = [json.loads(place.read(found.name) or b"") for found in place.objects()]
    assert sorted(why for part in left for why in part.values()) == ["no_chat", "too_long"]

    ingest.run(cfg)
    rows = cfg.table("traffic").read().to_pylist()
    rows = [row for row in rows if row["target_id"] == target_id(present)]
    texts = {tuple(row["prompt_ids"]): row for row in rows if row["domain"] == "text"}
    rows = {row["conversation_id"]: row for row in rows if row["domain"] != "text"}
    assert rows.keys() == PROMPTS.keys() - {"tools", "long"}
    model = load_target(present, torch.float32)
    for name, row in rows.items():
        check_row(model, name, row)
    assert texts.keys() == {(7, 8, 30, 5, 6), (7, 8, 30, 5, 4, 31, 5, 7, 8, 32, 5, 6)}
    for prompt, row in texts.items():
        assert (row["ids_source"], row["consent"]) == ("regenerated", True)
        if row["finish_reason"] != "repetition":
            assert row["output_ids"] == decode(model, [*prompt], LONGEST, (1,)).output_ids


def check_row(model, name, row):
    """Check that a row has the labels of its prompt, and what this target says to it."""
    assert (row["ids_source"], row["tenant"], row["domain"]) == ("regenerated", "acme", name[:4])
    warm = name in ("same0", "other0")
    assert row["temperature"] == pytest.approx(0.8 if warm else 0.0)
    same = name.startswith("same")
    wanted = PROMPTS[name] if same else [7, 8, PROMPTS[name][1], 5, 6]
    assert row["prompt_ids"] == wanted, "the messages are the same, in the present template"
    assert max(row["output_ids"]) < VOCABULARY
    if not warm and row["finish_reason"] != "repetition":
        assert row["output_ids"] == decode(model, wanted, LONGEST, (1,)).output_ids


def test_an_unknown_former_target_can_be_named(tmp_path, tiny_target, capsys):
    """An ingest of an earlier release kept no tokenizer."""
    former = former_target(tmp_path / "former", tiny_target, 1, TEMPLATE)
    old = load(None, [f"work={tmp_path / 'work'}", f"target.path={former}"])
    write_log(old, "a.jsonl", [line(1, target_id=target_id(former), prompt_ids=[3, 9, 5, 6])])
    ingest.run(old)
    old.place("targets").delete_all()
    cfg = load(None, [f"work={tmp_path / 'work'}", f"target.path={tiny_target}"])
    done = regenerate.run(cfg)
    assert (done["answers"], done["left_out"]) == (0, {"no_tokenizer": 1})
    assert "regenerate.former" in capsys.readouterr().err
    assert [*answer_places.left_out(cfg).objects()] == [], "a folder may still be named"
    kept_tokenizers.keep(cfg, former)
    assert len(regenerate.waiting(cfg)) == 1
    assert kept_tokenizers.kept(cfg, target_id(former)) is not None
    cfg.place("targets", target_id(former)).write("tokenizer.json", b"{")
    assert regenerate.run(cfg)["left_out"] == {"no_tokenizer": 1}
    assert "this tokenizer cannot be read" in capsys.readouterr().err
    [row] = regenerate.waiting(cfg)
    answered = json.dumps({"from_sample": row["sample_id"]})
    logs = answer_places.answer_logs(cfg)
    logs.write("torn.jsonl", f'{answered[:-4]}\n[]\n{{"v": 1}}\n'.encode())
    assert regenerate.waiting(cfg) == [row], "a damaged line answers nothing, and stops nothing"
    logs.write("whole.jsonl", answered.encode())
    assert regenerate.waiting(cfg) == []
