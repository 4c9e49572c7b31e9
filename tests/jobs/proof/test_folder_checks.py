"""Every broken rule for a drafter folder gives a row that says what is wrong and what to do."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash.checkpoint import drafter_sha256, load_drafter, read_config, save_drafter
from dflash.identity import legacy_target_id, target_id
from dflash.model import new_drafter
from dflash.target_model import load_borrowed
from dflash.vocabulary import set_vocabulary
from jobs.base.config import load
from jobs.base.drafter_shape import drafter_config
from jobs.dataset.samples import features_place
from jobs.proof.folder_checks import check_folder
from store.ids import sample_id
from tests.helpers.tables import put_rows
from tests.helpers.tiny import add_tokenizer, make_target

SETTINGS = ["drafter.num_taps=2", "drafter.block_size=4", "drafter.mask_token_id=96"]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A work folder with a target, traffic of it, and an evaluated drafter."""
    work = tmp_path_factory.mktemp("contract")
    add_tokenizer(make_target(work / "target"), 97)
    cfg = load(None, [f"work={work}", *SETTINGS, "serve.max_model_len=200"])
    write_traffic(cfg, [[5, 6, 7], [8, 9]])
    folder = save_drafter(new_drafter(drafter_config(cfg), 0), work / "drafters/d", torch.bfloat16)
    write_evaluation(cfg, folder, target_id(cfg.target_path))
    write_features(cfg, read_config(folder).target_layer_ids)
    return work


def write_traffic(cfg, outputs, identity=None):
    identity, rows = identity or target_id(cfg.target_path), []
    for i, output in enumerate(outputs):
        row = {"sample_id": sample_id(identity, [1, 2], output), "conversation_id": f"c{i}"}
        row |= {"target_id": identity, "split": "train", "repeat_count": 1, "temperature": 0.0}
        rows.append(row)
    put_rows(cfg, "selection", rows)
    tokens = [{"prompt_ids": [1, 2], "output_ids": output} for output in outputs]
    put_rows(cfg, "traffic", [row | ids for row, ids in zip(rows, tokens, strict=True)])


def write_features(cfg, taps):
    """List features of these layers under the target's id."""
    place = features_place(cfg, taps)
    put_rows(cfg, "feature_index", [{"features_key": place.name, "sample_id": "s"}])


def write_evaluation(cfg, folder, identity):
    path = cfg.path("evaluations", f"{folder.name}.json")
    path.parent.mkdir(exist_ok=True)
    found = {"drafter_sha256": drafter_sha256(folder), "target_id": identity}
    path.write_text(json.dumps(found))


@pytest.fixture
def work(healthy, tmp_path):
    return shutil.copytree(healthy, tmp_path / "work")


def look(work, *settings):
    """The rows by status, each as 'name: found'."""
    cfg = load(None, [f"work={work}", *SETTINGS, "serve.max_model_len=200", *settings])
    checks = check_folder(cfg, work / "drafters" / "d")
    assert all(check.fix for check in checks if check.status in ("fail", "warn"))
    rows = {status: [] for status in ("ok", "warn", "fail")}
    for check in checks:
        rows[check.status].append(f"{check.name}: {check.found}")
    return rows


def edit(work, **values):
    """Change keys of the drafter's config.json; None removes one."""
    path = work / "drafters" / "d" / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_a_sound_folder_passes_every_clause(work):
    rows = look(work)
    assert rows["fail"] == rows["warn"] == []
    names = [row.partition(":")[0] for row in rows["ok"]]
    assert names == ["config", "tensors", "target", "taps", "mask token", "causality", "length"]


def test_rows_of_the_head_are_the_targets_in_the_stored_dtype(work):
    """A drafter is stored in bfloat16, the target here in float32: rounding is no difference."""
    folder, head = work / "drafters" / "d", load_borrowed(work / "target", torch.float32)[1]
    shape = replace(load_drafter(folder).cfg, draft_vocab_size=40)
    drafter = new_drafter(shape, seed=0)
    set_vocabulary(drafter, head, torch.arange(50, 90))
    save_drafter(drafter, folder, torch.bfloat16)
    assert look(work)["fail"] == []
    set_vocabulary(drafter, head.roll(1, 0), torch.arange(50, 90))
    save_drafter(drafter, folder, torch.bfloat16)
    assert "lm_head.weight is not the target's" in look(work)["fail"][0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sharded_tied_target_passes_every_clause_in_both_dtypes(work, dtype):
    """Its head was once looked for in a model.safetensors, which a sharded target does not have."""
    model = AutoModelForCausalLM.from_pretrained(work / "target", dtype=dtype)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    (work / "target" / "model.safetensors").unlink()
    model.save_pretrained(work / "target", max_shard_size="10KB")
    own = load_borrowed(work / "target", torch.bfloat16)[1]
    rewrite(work, lambda tensors: tensors.update({"lm_head.weight": own}))
    know_again(work)
    rows = look(work, f"target.dtype={dtype}")
    assert rows["fail"] == rows["warn"] == []
    rewrite(work, lambda tensors: tensors.update({"lm_head.weight": own + 1}))
    fail = look(work, f"target.dtype={dtype}")["fail"]
    assert any("lm_head.weight is not the target's" in row for row in fail)


def know_again(work):
    """Write traffic and evaluation again, for the target and the drafter as they are now."""
    cfg = load(None, [f"work={work}", *SETTINGS])
    write_traffic(cfg, [[5, 6, 7], [8, 9]])
    write_evaluation(cfg, work / "drafters" / "d", target_id(cfg.target_path))
    write_features(cfg, read_config(work / "drafters" / "d").target_layer_ids)


def test_a_target_without_a_tokenizer_is_checked_without_one(work):
    for path in (work / "target").glob("tokenizer*"):
        path.unlink()
    know_again(work)
    assert look(work)["fail"] == []


def test_a_mask_token_that_only_generation_config_calls_an_end_is_refused(work):
    (work / "target" / "generation_config.json").write_text('{"eos_token_id": [0, 96]}')
    know_again(work)
    assert any("id 96 is the target's eos token" in row for row in look(work)["fail"])


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_target_that_cannot_be_read_is_a_row_and_no_traceback(work, name):
    (work / "target" / name).write_text('{"text_config": {}, "eos_token_id": "x"}')
    know_again(work)
    assert any("text_config" in row or "no token id" in row for row in look(work)["fail"])


def test_what_was_made_under_the_former_identity_is_told_from_another_target(work):
    cfg = load(None, [f"work={work}", *SETTINGS, "serve.max_model_len=200"])
    former = legacy_target_id(cfg.target_path)
    write_traffic(cfg, [[5, 6, 7]], former)
    write_evaluation(cfg, work / "drafters" / "d", former)
    fixes = [c.fix for c in check_folder(cfg, work / "drafters" / "d") if c.status == "fail"]
    known = [fix for fix in fixes if "former id: ingest, harvest and evaluate again" in str(fix)]
    assert len(known) == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_theta": None}, "config: .*lacks rope_theta"),
        ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, "rope_theta is 5.0 for"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "config: .*scaled RoPE"),
        ({"partial_rotary_factor": 0.25}, "config: .*partial_rotary_factor"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "config: .*layer_types"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "config: architectures"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "config: quantization_config is set: vLLM obeys it",
        ),
        ({"max_position_embeddings": 202}, r"length: .*202 < served length 200 \+ k 3"),
        ({"num_target_layers": 7}, "length: .*made for another target.*layers 7 != 6"),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "tensors: .*unknown layers"),
    ],
)
def test_a_config_that_would_be_served_wrongly(work, values, message):
    edit(work, **values)
    assert any(re.search(message, row) for row in look(work)["fail"]), look(work)


@pytest.mark.parametrize(
    ("dflash", "message"),
    [
        ({"target_layer_ids": [2, 3]}, r"taps: target_layer_ids \[2, 3\]: no features of these"),
        ({"target_layer_ids": [3, 1]}, "config: .*strictly increasing"),
        ({"target_layer_ids": [1, 5]}, "config: .*must lie in 0..4"),
        ({"mask_token_id": None}, "config: .*lacks mask_token_id"),
        ({"mask_token_id": 97}, "config: .*has no embedding row"),
        ({"mask_token_id": 0}, "mask token: id 0 is the target's (bos|eos) token"),
        ({"mask_token_id": 2}, "mask token: id 2 is the target's unk token"),
        ({"mask_token_id": 7}, "mask token: id 7 occurs in 1 of 2 samples"),
    ],
)
def test_a_dflash_config_that_would_be_served_wrongly(work, dflash, message):
    config = json.loads((work / "drafters" / "d" / "config.json").read_text())
    edit(work, dflash_config=config["dflash_config"] | dflash)
    assert any(re.search(message, row) for row in look(work)["fail"]), look(work)


def test_a_drafter_of_other_layers_passes_where_their_features_are(work):
    """It was once refused because drafter.taps names other layers, although its were harvested."""
    rows = look(work, "drafter.taps=[2,3]")
    assert rows["fail"] == []
    cfg = load(None, [f"work={work}", *SETTINGS, "serve.max_model_len=200"])
    cfg.place("feature_index").delete_all()
    [check] = [c for c in check_folder(cfg, work / "drafters" / "d") if c.status == "fail"]
    assert check.name == "taps"
    taps = ",".join(map(str, read_config(work / "drafters" / "d").target_layer_ids))
    assert f"`flywheel harvest drafter.taps={taps}`" in check.fix


def test_causality_must_be_written_once(work):
    edit(work, is_causal=None)
    assert any("causality: is_causal is not written" in row for row in look(work)["warn"])
    config = json.loads((work / "drafters" / "d" / "config.json").read_text())
    edit(work, is_causal=False, dflash_config=config["dflash_config"] | {"causal": True})
    assert any(
        "is_causal is False, dflash_config.causal is True" in row for row in look(work)["fail"]
    )


def rewrite(work, change):
    path = work / "drafters" / "d" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), "missing layers.1.mlp.up_proj.weight"),
        (lambda t: t.update(extra=torch.zeros(2)), "unknown extra"),
        (lambda t: t.update({"norm.weight": torch.ones(8)}), r"norm.weight is \(8,\), not \(32,\)"),
        (lambda t: t["fc.weight"].fill_(float("nan")), "not finite: fc.weight"),
        (
            lambda t: t.update({"embed_tokens.weight": torch.ones(97, 32)}),
            "embed_tokens.weight is not the target's",
        ),
    ],
)
def test_tensors_that_vllm_would_take(work, change, message):
    rewrite(work, change)
    rows = look(work)["fail"]
    assert any(re.search(f"tensors: .*{message}", row) for row in rows), rows


def test_a_copy_of_the_targets_own_embedding_is_fine(work):
    own = load_file(work / "target" / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(work, lambda tensors: tensors.update({"embed_tokens.weight": own}))
    assert look(work)["fail"] == []


def test_files_that_vllm_would_load_too(work):
    save_file({"x": torch.zeros(1)}, work / "drafters" / "d" / "old.safetensors")
    assert look(work)["fail"] == ["tensors: beside model.safetensors: old.safetensors"]
    (work / "drafters" / "d" / "mask_embedding.pt").write_bytes(b"x")
    assert any("has a mask_embedding.pt" in row for row in look(work)["fail"])


def test_mixed_dtypes_are_a_warning(work):
    rewrite(work, lambda t: t.update({"norm.weight": t["norm.weight"].float()}))
    assert any("stored as" in row for row in look(work)["warn"])


def test_a_target_that_changed_since_the_harvest_is_refused(work):
    """Only its chat template changed: the weights are the same, but the prompts are not."""
    before = target_id(work / "target")
    tokenizer = AutoTokenizer.from_pretrained(work / "target")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(work / "target")
    after = target_id(work / "target")
    rows = look(work)["fail"]
    assert f"target: {after} is to be served, traffic/ is of {before}" in rows
    assert f"target: evaluated with {before}, to be served with {after}" in rows


def test_a_drafter_that_was_not_evaluated_is_a_warning(work):
    (work / "evaluations" / "d.json").unlink()
    assert any("target: not evaluated" in row for row in look(work)["warn"])


def test_positions_and_k_are_checked_as_served(work):
    assert any("k = [4]" in row for row in look(work, "serve.k=[4]")["fail"])
    assert look(work, "serve.k=[2,1]")["ok"][-1] == "length: K = 2, positions 256 >= 200 + 2"
