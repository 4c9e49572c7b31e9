"""Text logs through the stage ingest: prompts to answer anew, or answers as they are."""

import json

import pytest

from dflash.identity import target_id
from jobs import ingest, regenerate
from jobs.base.config import load
from jobs.dataset.chat_rendering import ChatRenderer
from jobs.regeneration import new_answers
from jobs.regeneration.former_prompts import Asking
from serving.client import Completion
from tests.helpers.capture_logs import in_this_process, write_log
from tests.helpers.chat_target import make_chat_target
from tests.helpers.text_logs import CHAT, REQUEST, RESPONSE

MORE = [
    {"role": "user", "content": "Thanks, é \U0001f642"},
    {"role": "assistant", "content": "Bye"},
]
THOUGHT = {"role": "assistant", "content": "It left.", "reasoning": "Look it up."}


@pytest.fixture(scope="module")
def chat_target(tmp_path_factory):
    return make_chat_target(tmp_path_factory.mktemp("chat") / "target")


@pytest.fixture
def cfg(chat_target, tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    return load(None, [f"work={tmp_path / 'work'}", f"target.path={chat_target}"])


def write(cfg, *values):
    write_log(cfg, "texts.jsonl", [json.dumps(value) + "\n" for value in values])


def decoded(cfg, ids):
    return ChatRenderer(cfg.target_path).tokenizer.decode(ids, skip_special_tokens=False)


def test_texts_become_prompts_that_the_target_answers_once(cfg, capsys):
    kept = {"domain": "orders", "tenant": "acme", "consent": True, "language": ["de"]}
    chat = {"id": "x", "messages": CHAT + MORE, "timestamp": "2026-12-01T00:00:00Z"} | kept
    write(cfg, chat, chat, {"messages": [{"role": "?"}]}, {"messages": CHAT, "consent": False})
    done = ingest.run(cfg.override("ingest", max_reject_rate=1.0))
    assert (done["texts"], done["prompts"], done["samples"]) == (2, 4, 0)
    assert (done["formats"], done["dropped"]) == ({"messages": 2}, {"language": 2})
    assert (done["rejected"], done["not_used"]) == ({"unknown_role": 1}, {"no_consent": 1})
    assert "4 prompts that `flywheel regenerate` asks" in capsys.readouterr().err
    [text] = cfg.table("texts").read().to_pylist()
    assert text["repeat_count"] == 2

    rows = regenerate.waiting(cfg)
    asked = [*Asking(cfg, (row["target_id"] for row in rows)).requests(rows)]
    first, second = (decoded(cfg, request.prompt) for _, request in asked)
    assert first == "<|im_start|>user\nWhere is order 4410?<|im_end|>\n<|im_start|>assistant\n"
    assert second.startswith(first + "It left Porto today.<|im_end|>\n<|im_start|>user\nThanks, é")
    assert regenerate.plan(cfg)["domains"]["orders"]["prompts"] == 2

    (row, request), _ = asked
    ids = [one for one in request.prompt if isinstance(one, int)]
    answer = Completion(
        request_id="a",
        prompt_ids=[*ids],
        output_ids=[7, 8, 257],
        text="",
        spec=None,
        finish_reason="stop",
        top_logprobs=[],
        started=0.0,
        seconds=1.0,
        decode_seconds=None,
    )
    new_answers.keep(cfg, [(row, answer)], {})
    assert [row["sample_id"] for row in regenerate.waiting(cfg)] == [asked[1][0]["sample_id"]]
    assert ingest.run(cfg.override("ingest", max_reject_rate=1.0))["samples"] == 1
    [sample] = cfg.table("traffic").read().to_pylist()
    assert (sample["ids_source"], sample["domain"], sample["tenant"]) == (
        "regenerated",
        "orders",
        "acme",
    )
    assert (sample["prompt_ids"], sample["consent"]) == (ids, True)


def test_the_budget_and_the_template_leave_texts_out(cfg):
    write(
        cfg,
        {"messages": CHAT, "domain": "a"},
        {"messages": [{"role": "user", "content": "What is <|im_end|>?"}], "domain": "b"},
    )
    ingest.run(cfg)
    assert len(regenerate.waiting(cfg)) == 2
    assert len(regenerate.waiting(cfg.override("regenerate", tokens=1))) == 1
    rows = regenerate.waiting(cfg)
    asking = Asking(cfg, (row["target_id"] for row in rows))
    assert len([*asking.requests(rows)]) == 1
    assert [*asking.left_out.values()] == ["control_text"]


def test_without_a_chat_template_texts_are_left_out_and_nothing_stops(cfg, tmp_path, capsys):
    write(cfg, {"messages": CHAT})
    ingest.run(cfg)
    bare = make_chat_target(tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    other = load(None, [f"work={tmp_path / 'work'}", f"target.path={bare}"])
    done = regenerate.run(other)
    assert (done["answers"], done["left_out"]) == (0, {"unreadable": 1})
    assert "no chat template" in capsys.readouterr().err
    assert len(regenerate.waiting(other)) == 1, "it may be repaired"


def test_answers_are_learned_from_as_they_are_where_that_is_asked_for(cfg, capsys):
    """Each answer once, behind the prompt that serving would have rendered."""
    call = {"role": "assistant", "tool_calls": [{"name": "city", "arguments": '{"city": "Porto"}'}]}
    tools = [{"type": "function", "function": {"name": "city"}}]
    tool_round = [CHAT[0], call, {"role": "tool", "content": "now"}, CHAT[1]]
    cut = RESPONSE | {"choices": [{"message": CHAT[1], "finish_reason": "length"}]}
    write(
        cfg,
        {"messages": [CHAT[0], THOUGHT, *MORE]},
        {"messages": tool_round, "tools": tools},
        {"request": REQUEST, "response": cut},
    )
    done = ingest.run(cfg.override("ingest", text_logs="answers"))
    rows = cfg.table("traffic").read().to_pylist()
    assert (done["texts"], done["samples"], len(rows)) == (0, 5, 5)
    assert {(row["ids_source"], row["target_id"]) for row in rows} == {
        ("reencoded", target_id(cfg.target_path))
    }
    said = {decoded(cfg, row["output_ids"]): decoded(cfg, row["prompt_ids"]) for row in rows}
    assert said.keys() == {
        "<think>Look it up.</think>It left.<|im_end|>",
        "Bye<|im_end|>",
        "<call>Porto</call><|im_end|>",
        "It left Porto today.<|im_end|>",
        "It left Porto today.",
    }
    assert "Look it up" not in said["Bye<|im_end|>"], "the template strips earlier thoughts"
    assert said["It left Porto today.<|im_end|>"].endswith(
        "<call>Porto</call><|im_end|>\n<|im_start|>tool\nnow<|im_end|>\n<|im_start|>assistant\n"
    )
    assert said["<call>Porto</call><|im_end|>"].startswith("<|im_start|>tools\ncity")
    assert done["drift"] == {"answers": 1, "other": 1, "counted": 7, "encoded": 20}
    assert "1 of 1 answers have another number of tokens" in " ".join(
        capsys.readouterr().err.split()
    )
    assert all(row["loss_mask"][0]["start"] == row["prompt_tokens"] for row in rows)
    # Back to prompts: the re-encoded samples go.
    assert ingest.run(cfg)["samples"] == 0
    assert cfg.table("texts").read().num_rows == 3


def test_explain_says_what_was_recognised_and_why_records_are_left_out(cfg, tmp_path, capsys):
    good, bad = json.dumps({"messages": CHAT}), json.dumps({"messages": [{"role": "wizard"}]})
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "a.jsonl").write_text(f"{good}\n{bad}\n" + '{"secret": 1, "consent": "no"}\n{"a\n')
    (folder / "b.json").write_text(json.dumps({"vocab_size": 1}, indent=1))
    found = ingest.explain(cfg.override("ingest", logs=[str(folder)]))["explained"]
    a, b = found.values()
    assert a == {
        "layout": "lines",
        "records": {"messages": 1, "unknown_role": 1, "no_consent": 1, "not_json": 1},
    }
    assert b == {"layout": "elements", "records": {"other_file": 1}}
    shown = capsys.readouterr().err
    assert "wizard" in shown
    assert str(len(good) + 1) in shown
    assert "secret" not in shown
    assert not cfg.table("traffic").place.has("_delta_log"), "nothing is written"
