"""`flywheel verify` in bfloat16 on a tiny target with real servers: what passes, and what fails."""

import json
import shutil
from dataclasses import replace

import pytest

from dflash.model import drafter_of
from jobs import evaluate, verify
from jobs.base import cli
from jobs.base.config import load
from jobs.proof import verdict
from jobs.proof.kept_results import known_costs
from jobs.servers import server_pool
from serving.greedy import Difference
from tests.helpers.work import CHAT_SETTINGS, make_chats

pytest.importorskip("vllm")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SETTINGS = [
    *CHAT_SETTINGS,
    "target.dtype=bfloat16",
    "serve.max_model_len=128",
    "verify.requests=2",
    "verify.repeats=1",
    "verify.reference_requests=1",
    "verify.concurrency=8",
    "evaluate.bootstrap=200",
]


@pytest.fixture(scope="module")
def work(tmp_path_factory, ray_cluster):
    """Harvested chat traffic with a drafter that was evaluated in bfloat16."""
    folder = make_chats(tmp_path_factory.mktemp("verify"))
    evaluate.run(configure(folder))
    return folder


def configure(work):
    return load(None, [f"work={work}", *SETTINGS])


@pytest.fixture(scope="module")
def champion(work):
    """drafters/good is the champion of all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "resolve", lambda *args: ("1", work / "drafters" / "good"))
        yield


@pytest.fixture(scope="module")
def first(work, champion):
    """The result of a verification that ran, and what its servers gave."""
    kept = []

    def spy(*args):
        kept.append(real(*args))
        return kept[0]

    real = verify.measure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "measure", spy)
        return verify.run(configure(work)), kept[0]


def test_a_right_drafter_passes_in_bfloat16(first):
    result, _ = first
    assert result["ok"], result["faults"]
    assert result["greedy"]["different"] == 0
    assert result["same_text"]["requests"] == result["requests"]
    read = [result["greedy"][name]["tokens"] for name in ("control", "drafted")]
    assert min(read) > 20 * result["requests"]
    compared = result["comparison"]
    assert compared["rounds"] == result["rounds"] > 50
    assert compared["faults"] == []
    assert result["tau_served"]["pooled"] == pytest.approx(
        result["tau_replay"]["pooled"], rel=compared["limits"]["pooled"]
    )
    assert result["tau_served"]["pooled"] > 1.5, "a drafter that accepts nothing proves nothing"
    assert result["reference"]["requests"] == 1
    assert set(result["speedup"]) == {"1", "8"}


def test_a_pass_is_kept_and_reused(first, work, monkeypatch):
    monkeypatch.setattr(verify, "measure", lambda *args: pytest.fail("measured again"))
    assert verify.run(configure(work)) == first[0] | {"reused": True}


def test_a_folder_needs_no_champion_and_its_costs_are_those_of_its_shape(first, work, monkeypatch):
    result, measured = first
    monkeypatch.setattr(verify, "resolve", lambda *args: None)
    with pytest.raises(ValueError, match="there is no champion to verify: name a folder"):
        verify.run(configure(work))
    monkeypatch.setattr(verify, "measure", lambda *args: pytest.fail("measured again"))
    cfg = configure(work).override("verify", drafter=str(work / "drafters" / "good"))
    assert verify.run(cfg) == result | {"reused": True}
    for sha256, compat in ((result["drafter_sha256"], {}), ("another", result["compat"])):
        costs, source = known_costs(cfg, sha256, compat)
        assert source is not None
        assert (costs, source["drafter"]) == (measured.costs, "good")
    assert known_costs(cfg, "another", result["compat"] | {"block_size": 9}) == ([], None)
    assert known_costs(cfg.override("serve", max_num_seqs=3), "another", result["compat"])[0] == []
    assert known_costs(cfg.override("serve", port=1), "another", result["compat"])[0]


def test_a_changed_config_is_another_drafter(first, work, monkeypatch):
    """With another rms_norm_eps tau fell from 2.70 to 1.29, but the kept result was shown."""
    changed = shutil.copytree(work / "drafters" / "good", work / "changed")
    path = changed / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1.0}))
    monkeypatch.setattr(verify, "resolve", lambda *args: ("1", changed))
    with pytest.raises(ValueError, match="was not replayed on these samples: `flywheel evaluate`"):
        verify.run(configure(work))


def again(monkeypatch, work, measured):
    """Run the command `verify` again on these measurements, for its exit code and messages."""
    for path in work.glob("verified/*.json"):
        path.unlink()
    monkeypatch.setattr(verify, "measure", lambda *args: measured)
    return cli.main(["verify", f"work={work}", *SETTINGS])


def test_an_engine_that_computes_another_drafter_fails(first, work, monkeypatch, capsys):
    """Once the different numbers were only printed, and the exit code was 0."""

    def changed(*args):
        drafter = real(*args)
        return drafter_of(replace(drafter.cfg, rms_norm_eps=1.0), drafter.state_dict())

    real = verdict.load_drafter
    monkeypatch.setattr(verdict, "load_drafter", changed)
    assert again(monkeypatch, work, first[1]) == 1
    printed = capsys.readouterr()
    summary = json.loads(printed.out.splitlines()[-1])
    assert not summary["ok"]
    assert "off the replayed" in summary["faults"][0]
    assert "verify failed" in printed.err
    [path] = work.glob("verified/*.json")
    assert json.loads(path.read_text())["ok"] is False
    assert again(monkeypatch, work, first[1]) == 1, "a failure is measured again, not kept"


def test_texts_that_the_control_does_not_explain_fail(first, work, monkeypatch, capsys):
    wrong = Difference(index=0, position=3, plain_id=1, drafted_id=2, gap=5.0)
    report = replace(first[1].text, different=[wrong], bound=0.7)
    assert again(monkeypatch, work, replace(first[1], text=report)) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["greedy"]["different"] == 1
    [fault] = summary["faults"]
    assert (
        "1 greedy texts differ beyond what the plain server explains (gaps 5; bound 0.7;" in fault
    )


def test_without_memory_for_one_server_it_is_refused_at_once(work, champion, monkeypatch):
    monkeypatch.setattr(server_pool, "free_bytes", lambda: 2**30)
    monkeypatch.setattr(verify, "check_reference", lambda *args: pytest.fail("began"))
    for path in work.glob("verified/*.json"):
        path.unlink()
    with pytest.raises(ValueError, match=r"verify needs 1 .*room for 0.*1\.0 GiB are free"):
        verify.run(configure(work))
