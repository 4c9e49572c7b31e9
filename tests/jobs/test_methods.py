"""`flywheel methods` without a server: what is tried, what is missing, what is printed."""

from contextlib import nullcontext
from typing import Any

import pytest

from jobs.base import cli
from jobs.base.config import load
from jobs.base.sections.serving import METHODS
from jobs.proof import draft_methods, method_runs
from jobs.reporting.methods_table import table_line
from serving.client import Speed
from tests.helpers.tiny import make_target


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A work folder with a target and nothing else."""
    folder = tmp_path_factory.mktemp("methods")
    make_target(folder / "target")
    return folder


def configure(folder, *more):
    return load(None, [f"work={folder}", *more])


def test_each_method_says_what_it_lacks(work):
    found = {name: draft_methods.describe(configure(work), name) for name in METHODS}
    missing = {name: method.missing for name, method in found.items() if method.missing}
    assert set(missing) >= {"draft_model", "eagle3", "mtp", "dflash"}
    assert "methods.draft_model names no folder" in missing["draft_model"]
    assert "no MTP heads" in missing["mtp"]
    assert "no drafter in" in missing["dflash"]
    assert found["ngram"].settings == {"k": [4], "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    assert found["suffix"].settings["suffix_decoding_max_cached_requests"] == 0


@pytest.mark.parametrize(
    ("config", "has"),
    [
        ({}, False),
        ({"num_nextn_predict_layers": 0}, False),
        ({"num_nextn_predict_layers": 1}, True),
        ({"text_config": {"mtp_num_hidden_layers": 1}}, True),
    ],
)
def test_mtp_heads_are_found_in_the_targets_config(config, has):
    assert draft_methods.has_mtp_heads(config) is has


def test_a_named_model_is_served_with_our_settings(work):
    cfg = configure(work, f"methods.draft_model={work}/target", "methods.k=3,2", "serve.k=[]")
    method = draft_methods.describe(cfg, "draft_model")
    assert method.settings == {"k": [3, 2], "model": "target"}
    plain = method_runs.start(cfg, draft_methods.Method(name="none")).args
    args = method_runs.start(cfg, method).args
    assert args[: len(plain)] == plain
    assert "--no-enable-prefix-caching" in plain
    schedule = '"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 2, 2]]'
    assert schedule in args[len(plain) + 1]


def test_a_folder_that_is_no_model_is_refused(work, capsys):
    settings = [f"work={work}", f"methods.eagle3={work}"]
    assert cli.main(["methods", *settings]) == 2
    assert "methods.eagle3" in capsys.readouterr().err


def test_what_the_engine_refuses_is_listed_with_its_reason(work, monkeypatch):
    class Refusing(nullcontext):
        def __enter__(self):
            raise ValueError("vLLM did not start: ValueError: no such method here")

    class Plain:
        up: bool

        def is_up(self):
            return self.up

    def attempt(up):
        plain: Any = Plain()
        control: Any = None  # not used: no answer is compared
        plain.up = up
        return method_runs.attempt(
            cfg, draft_methods.describe(cfg, "ngram"), plain, [], [], control, []
        )

    cfg = configure(work)
    monkeypatch.setattr(method_runs, "start", lambda *_: Refusing())
    with pytest.raises(ValueError, match="no such method"):
        attempt(False)  # the plain server died, so the method did not fail
    row, speeds = attempt(True)
    assert (row["available"], speeds) == (False, [])
    line = table_line({"method": "ngram", "settings": {}, **row}, 6)
    assert line[1] == "not available: vLLM did not start: ValueError: no such method here"
    assert line[2:] == [None] * 4


def test_tau_is_tokens_over_rounds_pooled():
    found = method_runs.acceptance({"a": (30, 10), "b": (10, 10)})
    assert found["tau"] == {"pooled": 2.0, "domains": {"a": 3.0, "b": 1.0}}
    with pytest.raises(ValueError, match="no rounds"):
        method_runs.acceptance({"a": (0, 0)})


def test_latency_is_the_median_and_the_nearest_rank():
    found = method_runs.latency([float(i) for i in range(20, 0, -1)])
    assert found == {"requests": 20, "median": 10.5, "p95": 19.0}
    assert method_runs.latency([3.0])["p95"] == 3.0
    with pytest.raises(ValueError, match="no request"):
        method_runs.latency([])


def speed(**more):
    values: dict[str, Any] = {
        "concurrency": 8,
        "plain": [10.0],
        "drafted": [20.0],
        "ratios": [2.0],
        "ratio": 2.0,
        "plain_seconds": [4.0],
        "drafted_seconds": [2.0],
    }
    return Speed(**{**values, **more})


def test_the_plain_server_is_measured_beside_every_method():
    alone = method_runs.plain_alone([speed(), speed(plain=[14.0], plain_seconds=[8.0])])
    assert (alone.plain, alone.ratio, alone.drafted_seconds) == ([10.0, 14.0], 1.0, [4.0, 8.0])


def test_a_line_of_the_table():
    counts = {"requests": 32, "identical": 31, "near_ties": 1, "different": 0}
    row = {
        "method": "ngram",
        "settings": {"k": [7, 3], "prompt_lookup_max": 4},
        "available": True,
        **method_runs.acceptance({"a": (30, 10)}),
        "greedy": counts,
        "speeds": [method_runs.summarise(speed(ratios=[1.5, 2.0, 2.5]))],
    }
    assert table_line(row, 7) == [
        "ngram",
        "k 7, 3; prompt_lookup_max 4",
        3.0,
        3.0,
        "2.00 (1.50..2.50)",
        "2.00, 2.00",
        "31, 1, 0",
    ]
