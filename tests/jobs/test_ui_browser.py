"""The page of `flywheel ui` in a real browser: on a phone, on a desk."""

import shutil
import threading
import time

import pytest
import uvicorn

from jobs.base.config import load
from jobs.looking.looks import Looks
from jobs.looking.web_app import application
from store.schemas import TABLES
from tests.helpers.browser import BROWSER, NO_BROWSER, browse, measured
from tests.helpers.store import DAY, fill
from tests.helpers.tables import add_rows
from tests.jobs.test_hostile import NAMED

pytestmark = pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)
WIDTHS = (360, 1000)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """{store: (page as HTML, its address)} from a real server: empty, healthy, broken. Domains and
    reasons of the last two are hostile.
    """
    folder = tmp_path_factory.mktemp("ui")
    fill(load(None, [f"work={folder / 'healthy'}"]))
    hostile(load(None, [f"work={folder / 'healthy'}"]))
    shutil.copytree(folder / "healthy", folder / "broken")
    for name in ("windows", "logs"):
        for file in (folder / "broken" / name / "_delta_log").glob("*.json"):
            file.write_text("{broken")
    found, servers = {}, []
    for name in ("empty", "healthy", "broken"):
        cfg = load(None, [f"work={folder / name}"])
        looks = Looks(cfg, folder / f"own-{name}")
        looks.look()
        app = application(cfg, looks)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
        thread = threading.Thread(target=server.run)
        thread.start()
        servers.append((server, thread))
        while not server.started:
            time.sleep(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        found[name] = f"http://127.0.0.1:{port}"
    yield found
    for server, thread in servers:
        server.should_exit = True
        thread.join(20)


def hostile(cfg):
    """Answers of today with these domains, and a decision with such a reason and author."""
    base = dict.fromkeys(TABLES["acceptance"].names)
    rows = cfg.table("acceptance").read().to_pylist()
    last = max((r for r in rows if r["log"]), key=lambda r: r["finished_at"])
    add_rows(cfg, "acceptance", [base | last | {"domain": name} for name in NAMED])
    reason = " ".join(NAMED)
    decision = {"number": 9, "decided_at": DAY, "action": "hold", "who": NAMED[3], "reason": reason}
    add_rows(cfg, "promotions", [decision | {"to_version": NAMED[3], "evidence": "null"}])


@pytest.fixture(scope="module")
def seen(pages, tmp_path_factory):
    """{store: {width: what the browser measures}}."""
    found = {}
    for name, url in pages.items():
        folder = tmp_path_factory.mktemp("harness")
        # Through the server itself: its policy holds, and a message in the console fails.
        page = browse(folder, "--dump-dom", url)
        found[name] = measured(folder, page, WIDTHS)
    return found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["empty", "healthy", "broken"])
def test_nothing_is_wider_than_the_screen(seen, name, width):
    one = seen[name][width]
    assert width - 20 <= one["width"] <= width
    assert one["scroll"] <= one["width"]
    assert one["outside"] == []
    assert max(one["tables"], default=0) <= one["width"]


def test_labels_are_shown_as_text(seen):
    text = seen["healthy"][1000]["text"]
    assert "</script><b>x" in text
    assert "{x}" in text
    assert "\u202e" not in text


@pytest.mark.parametrize("width", WIDTHS)
def test_pictures_have_readable_labels(seen, width):
    pictures = seen["healthy"][width]["pictures"]
    assert [one["id"] for one in pictures] == [*(f"acceptance-{i}" for i in (1, 2, 3)), "canary-1"]
    for one in pictures:
        left, top, right, bottom = one["box"]
        assert one["font"] > 9, one["id"]
        for text, (x0, y0, x1, y1) in one["texts"]:
            assert left - 2 <= x0 <= x1 <= right + 2, text
            assert top - 2 <= y0 <= y1 <= bottom + 2, text


def test_a_broken_store_says_so_and_shows_the_rest(seen):
    text = seen["broken"][360]["text"]
    assert text.count("the table windows cannot be read") == 3  # windows, triggers, a card
    assert "version 2" in text
