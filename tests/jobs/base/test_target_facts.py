"""What the target's folder says about its shape, and the message if traffic/ has no row of it."""

import json

import pytest

from dflash.identity import legacy_target_id, target_id
from jobs.base.config import load
from jobs.base.drafter_shape import mask_token
from jobs.base.target_facts import end_tokens, target_taps
from jobs.dataset.samples import none_of_target
from jobs.ingestion.rules import make_rules
from tests.helpers.tables import add_rows
from tests.helpers.tiny import add_tokenizer, make_target


@pytest.fixture
def cfg(tmp_path):
    make_target(tmp_path / "target")
    return load(None, [f"work={tmp_path}"])


def test_more_taps_than_layers_is_one_message(cfg):
    with pytest.raises(ValueError, match=r"num_taps = 9: a target of 6 layers has at most 3"):
        target_taps(cfg.override("drafter", num_taps=9))


def test_a_target_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"target.path .*/gone: no such folder"):
        make_rules(load(None, [f"work={tmp_path}", f"target.path={tmp_path}/gone"]))


def write_traffic(cfg, *identities):
    if not identities:
        return
    rows = [
        {"sample_id": f"s{i}", "target_id": name, "split": "train", "repeat_count": 1}
        for i, name in enumerate(identities)
    ]
    add_rows(cfg, "traffic", rows)


def test_traffic_of_the_former_identity_asks_for_ingest_not_for_another_target(cfg):
    former = legacy_target_id(cfg.target_path)
    write_traffic(cfg, former)
    message = str(none_of_target(cfg, "test sample", "ingest more"))
    assert f"under this folder's former id {former}" in message
    assert "run `flywheel ingest` again" in message


@pytest.mark.parametrize("known", [[], ["other"], ["own"], ["own", "former"]])
def test_otherwise_the_stage_says_what_it_lacks(cfg, known):
    names = {"own": target_id(cfg.target_path), "former": legacy_target_id(cfg.target_path)}
    write_traffic(cfg, *(names.get(name, name) for name in known))
    message = str(none_of_target(cfg, "test sample", "ingest more"))
    fix = "ingest more" if known else "run `flywheel ingest` first"
    assert message.endswith(f"has no test sample of target {names['own']}: {fix}")


def ends(cfg, **files):
    """Write eos_token_id (None: no such key) into these JSON files of the target."""
    for name, value in files.items():
        path = cfg.target_path / f"{name}.json"
        found = json.loads(path.read_text()) if path.is_file() else {}
        found.pop("eos_token_id", None)
        path.write_text(json.dumps(found | ({} if value is None else {"eos_token_id": value})))


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        (0, [0, 45], False, [0, 45]),
        (None, [7, 45], False, [7, 45]),
        ([3, 4], None, False, [3, 4]),
        (0, 45, True, [0, 1, 45]),  # add_tokenizer: w1 ends a text
        (None, None, True, [1]),
    ],
)
def test_all_end_tokens_count_wherever_they_stand(cfg, config, generation, tokenizer, expected):
    """Answers once went on after an end that only generation_config.json names, unlike in vLLM."""
    ends(cfg, config=config, generation_config=generation)
    if tokenizer:
        add_tokenizer(cfg.target_path, 97)
    assert end_tokens(cfg) == expected


def test_a_target_without_an_end_of_text_is_named(cfg):
    """It was once a KeyError: 'eos_token_id'."""
    ends(cfg, config=None, generation_config=None)
    with pytest.raises(
        ValueError, match=r"names no end of text: write eos_token_id into its gener"
    ):
        end_tokens(cfg)
    (cfg.target_path / "generation_config.json").unlink()
    with pytest.raises(ValueError, match="names no end of text"):
        end_tokens(cfg)


@pytest.mark.parametrize("value", ["</s>", [0, "1"], -1, [True]])
def test_an_end_that_is_no_token_id_is_named(cfg, value):
    ends(cfg, generation_config=value)
    with pytest.raises(
        ValueError, match=r"generation_config\.json: eos_token_id .* is no token id"
    ):
        end_tokens(cfg)


def test_a_damaged_generation_config_is_named(cfg):
    (cfg.target_path / "generation_config.json").write_text('{"eos_token_id": ')
    with pytest.raises(ValueError, match=r"generation_config\.json is damaged"):
        end_tokens(cfg)


def test_a_mask_token_needs_a_tokenizer_or_a_setting(cfg):
    with pytest.raises(ValueError, match=r"has no tokenizer .*set drafter\.mask_token_id"):
        mask_token(cfg, 97)
    (cfg.target_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="its tokenizer cannot be read"):
        mask_token(cfg, 97)
