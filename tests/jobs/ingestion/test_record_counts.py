"""Rejected and unused records: which stop an ingest, which are only counted, and the messages."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from jobs import ingest
from tests.helpers.capture_logs import line, samples, write_log

pytestmark = pytest.mark.usefixtures("ray_cluster")


def pair(i, answered="qwen3-8b", asked="qwen3-8b", **response):
    """A request/response line of a gateway."""
    choices = [{"finish_reason": "stop", "token_ids": [4, i, 6]}]
    answer = {
        "id": f"r{i}",
        "model": answered,
        "prompt_token_ids": [1, 2, 3, i],
        "choices": choices,
    }
    return json.dumps({"request": {"model": asked}, "response": answer | response}) + "\n"


def test_too_many_rejects_publish_nothing_and_say_what_is_wrong(configure):
    cfg = configure()
    write_log(cfg, "a.jsonl", [line(i) for i in range(90)])
    (cfg.path("capture") / "b.jsonl").write_bytes(os.urandom(2000).replace(b"\n", b"") + b"\n" * 2)
    write_log(cfg, "c.jsonl", ["{}\n"] * 12)
    with pytest.raises(ValueError, match=r"13 of 103 records rejected \(12\.6% > .*unknown_format"):
        ingest.run(cfg)
    assert cfg.table("traffic").version() is None
    assert len(cfg.table("logs").read()) == 0
    assert len(cfg.table("rejects").read()) == 13
    summary = ingest.run(configure("ingest.max_reject_rate=0.2"))
    assert (summary["reused"], summary["samples"]) == (3, 90)


@pytest.mark.parametrize("content", ["", "\n\n", None], ids=["empty", "blank", "one of two"])
def test_empty_logs(configure, content):
    cfg = configure()
    write_log(cfg, "empty.jsonl", [content or ""])
    if content is None:
        write_log(cfg, "full.jsonl", [line(i) for i in range(3)])
        assert ingest.run(cfg)["samples"] == 3
        return
    with pytest.raises(ValueError, match=r"no record in 1 log file.*empty\.jsonl"):
        ingest.run(cfg)


def test_a_gateway_log_of_several_models_is_not_used_until_one_is_named(configure):
    """Half of the traffic was once another model's, and no message said so."""
    names = ["qwen3-8b", "qwen3-4b-fallback", "qwen3-8b", "acme-support-lora"] * 4
    asked = ["qwen3-8b", "qwen3-8b", "qwen3-8b", "acme-support-lora"] * 4
    lines = [pair(i, *both) for i, both in enumerate(zip(names, asked, strict=True))]
    cfg = configure()
    write_log(cfg, "gateway.jsonl", lines)
    with pytest.raises(
        ValueError, match=r"qwen3-8b \(8\), acme-support-lora \(4\); 4 more are by an"
    ):
        ingest.run(configure("ingest.max_reject_rate=1"))
    assert cfg.table("traffic").version() is None
    summary = ingest.run(configure("ingest.models=[qwen3-8b]"))
    assert (summary["accepted"], summary["rejected"]) == (8, {})
    assert summary["not_used"] == {"not_in_models": 8}


def test_an_answer_of_another_model_counts_as_untrustworthy(configure, capsys):
    lines = [pair(i) for i in range(40)] + [pair(99, "qwen3-4b-fallback")]
    write_log(configure(), "gateway.jsonl", lines)
    summary = ingest.run(configure())
    assert (summary["accepted"], summary["rejected"]) == (40, {"other_model": 1})
    assert "qwen3-4b-fallback" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"other_model.*list them in ingest\.models"):
        ingest.run(configure("ingest.max_reject_rate=0"))


def test_what_is_merely_not_wanted_never_stops(configure, capsys):
    """20 % adapter traffic, or one-token answers, once stopped ingest as if it were damage."""
    cfg = configure()
    write_log(
        cfg, "fleet.jsonl", [line(i, adapter="lora" if i % 5 == 0 else None) for i in range(16)]
    )
    short = [line(i, output_ids=[7] if i % 5 == 0 else [1, 2]) for i in range(16, 32)]
    write_log(cfg, "classifier.jsonl", short)
    strict = configure("ingest.max_reject_rate=0")
    summary = ingest.run(strict)
    assert (summary["accepted"], summary["rejected"]) == (25, {})
    assert summary["not_used"] == {"adapter": 4, "short_output": 3}
    assert "Not used" in capsys.readouterr().err
    assert len(cfg.table("rejects").read()) == 0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line(i, target_id="f00") for i in range(5)], r"other_target.*f00 \(5\).*target\.path"),
        ([line(i, consent="off") for i in range(5)], "no_consent.*clear yes"),
        ([pair(i, prompt_token_ids=None) for i in range(5)], "no_token_ids.*return_token_ids"),
        (['{"messages": [{"role": "assistant", "content": "a"}]}\n'] * 5, "no_answer.*whole"),
        ([line(i, adapter="[/lora]") for i in range(5)], r"adapter.*\[/lora\] \(5\)"),
    ],
)
def test_nothing_to_use_is_one_message_with_the_largest_reason(configure, lines, message):
    write_log(configure(), "a.jsonl", [*lines, line(99, output_ids=[1])])
    with pytest.raises(ValueError, match=f"none of the 6 records can be used; 5 .*{message}"):
        ingest.run(configure())


def test_nothing_new_to_use_is_a_note_where_traffic_is(configure, capsys):
    cfg = configure()
    path = write_log(cfg, "a.jsonl", [line(i) for i in range(5)])
    ingest.run(cfg)
    path.unlink()
    write_log(cfg, "b.jsonl", [line(9, adapter="lora")])
    assert ingest.run(cfg)["samples"] == 5
    assert "note: none of the 1 records can be used" in capsys.readouterr().err


def test_a_file_of_another_kind_is_named_once_and_not_copied(configure):
    """A truncated array once gave one reject per line, 31 MB in all."""
    text = "[\n" + '  {\n    "id": 7,\n    "secret": "words"\n  },\n' * 50_000
    write_log(configure(), "array.jsonl", [text])
    with pytest.raises(ValueError, match=r"1 records.*other_file.*log-formats\.md"):
        ingest.run(configure())
    assert sum(p.stat().st_size for p in configure().path("rejects").rglob("*.parquet")) == 0


def test_one_torn_line_in_a_short_log_does_not_stop_ingest(configure):
    """1 of 10 is more than 5 %, but no evidence that the true rate is above 5 %."""
    cfg = configure()
    write_log(cfg, "a.jsonl", [*(line(i) for i in range(9)), line(9)[:40] + "\n"])
    summary = ingest.run(cfg)
    assert (summary["accepted"], summary["rejected"]) == (9, {"not_json": 1})
    with pytest.raises(ValueError, match="1 of 10 records rejected"):
        ingest.run(configure("ingest.max_reject_rate=0"))


def test_a_wrong_answerers_samples_go_when_the_right_names_accept_nothing(configure, target):
    """When no record was accepted, nothing was published. So the other model's samples once stayed
    in traffic/.
    """
    cfg = configure()
    write_log(cfg, "gateway.jsonl", [pair(i, "fallback", "fallback") for i in range(10)])
    assert ingest.run(cfg)["samples"] == 10
    with pytest.raises(ValueError, match="not_in_models"):
        ingest.run(configure("ingest.models=[qwen3-8b]"))
    assert len(samples(cfg)) == 0
    assert ingest.run(cfg)["samples"] == 10, "the former rules come back"
    save_file({"w": torch.ones(4)}, target / "model.safetensors")
    with pytest.raises(ValueError, match="not_in_models"):
        ingest.run(configure("ingest.models=[qwen3-8b]"))
    assert len(samples(cfg)) == 10, "those of another target stay"
