"""Prometheus and Grafana: queries are asked of what a real replica serves.

data/replica_metrics.txt is /metrics of a vLLM server with capture, after six answers with one
drafter, a change of the drafter, and six with the other. tests/serving/test_swap_served.py checks
that today's server still serves every metric.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from jobs.base.config import load
from tests.helpers.commands import checked, commands
from tests.helpers.promql import INFRA, SCRAPED, asked, missing, queries, served

RECORDED = (Path(__file__).parent / "data/replica_metrics.txt").read_text()
SERVED = served(RECORDED)
NAMED_AHEAD = ("flywheel_capture_total", "flywheel_swaps_total")
"""Counters whose every outcome is served from the start, as zero."""


def test_every_metric_is_served():
    assert missing(RECORDED) == set()
    assert missing(RECORDED.replace("flywheel_swaps", "flywheel_changes")) == {
        "flywheel_swaps_total"
    }


@pytest.mark.parametrize(("where", "query"), queries().items())
def test_a_query_fits_what_is_served(where, query):
    for one in asked(query):
        if one.metric == "up":
            continue
        series = SERVED[one.metric]
        assert one.labels <= series.labels | SCRAPED, one
        # A counter starts anew with its process; only rate() and increase() know that.
        assert one.is_rate == (series.kind in ("counter", "histogram")), one
        if one.metric in NAMED_AHEAD:
            assert one.values <= series.values, one


@pytest.mark.parametrize(
    ("query", "labels", "is_rate"),
    [
        ("sum by (drafter) (rate(m{a='1'}[5m])) > 0", {"drafter", "a"}, True),
        ("sum(m) / 2", set(), False),
        ("count by (x) (max by (y) (m)) unless on (z) m", {"x", "y"}, False),
    ],
)
def test_queries_are_read_right(query, labels, is_rate):
    first = asked(query)[0]
    assert (first.metric, first.labels, first.is_rate) == ("m", labels, is_rate)


def test_every_rule_says_what_to_do_and_has_recorded_series():
    rules = yaml.safe_load((INFRA / "prometheus/rules.yaml").read_text())["groups"][0]["rules"]
    tests = yaml.safe_load((INFRA / "prometheus/tests.yaml").read_text())["tests"]
    firing = {
        case["alertname"]
        for test in tests
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert firing == {rule["alert"] for rule in rules}
    for rule in rules:
        assert rule["labels"]["severity"] in ("page", "ticket")
        for words in commands(rule["annotations"]["action"]):
            checked(words)


PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
def test_rules_fire_over_recorded_series_and_only_then():
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "tests.yaml"]):
        done = subprocess.run(
            [str(PROMTOOL), *command],
            cwd=INFRA / "prometheus",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_board_shows_what_it_has_to():
    board = json.loads((INFRA / "grafana/flywheel.json").read_text())
    source = yaml.safe_load((INFRA / "grafana/datasource.yaml").read_text())["datasources"][0]
    boxes = [panel["gridPos"] for panel in board["panels"]]
    cells = [
        (x, y)
        for b in boxes
        for x in range(b["x"], b["x"] + b["w"])
        for y in range(b["y"], b["y"] + b["h"])
    ]
    assert len(cells) == len(set(cells)), "panels lie on one another"
    assert max(x for x, _ in cells) < 24
    for panel in board["panels"]:
        if panel["type"] == "text":
            for words in commands(panel["options"]["content"]):
                checked(words)
        else:
            assert panel["datasource"]["uid"] == source["uid"]
            assert panel["description"]


def test_prometheus_finds_the_replicas_of_a_fleet(tmp_path):
    from jobs.fleet import FLEET_TARGETS, _tell  # it imports Ray Serve

    cfg = load(None, [f"work={tmp_path}"])
    urls = ["http://127.0.0.1:4001", "http://127.0.0.1:4002"]
    _tell(cfg, "http://127.0.0.1:8000", tmp_path / "token", urls)
    found = json.loads(cfg.path(FLEET_TARGETS).read_text())
    assert found == [{"targets": ["127.0.0.1:4001", "127.0.0.1:4002"]}]
    scrapes = yaml.safe_load((INFRA / "prometheus/prometheus.yaml").read_text())["scrape_configs"]
    compose = load(INFRA / "flywheel.yaml")
    assert scrapes[0]["file_sd_configs"][0]["files"] == [str(compose.path(FLEET_TARGETS))]
    assert scrapes[0]["job_name"] == "replicas", "the rule ReplicaAway has this name"
