"""The page in a real browser: a phone, a desk, paper."""

import re
import shutil
from pathlib import Path

import pytest

from jobs import evaluate
from jobs.base.config import load
from jobs.dataset.samples import load_requests
from jobs.proof import reference_check
from jobs.reporting.page import publish
from tests.helpers.browser import BROWSER, NO_BROWSER, browse, measured
from tests.helpers.work import RIVAL_SETTINGS

pytestmark = pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)
WIDTHS = (360, 1000)


@pytest.fixture(scope="module")
def page(tmp_path_factory, rivals):
    """The page of a real evaluation, with a baseline and decoded rows."""
    work = shutil.copytree(rivals, tmp_path_factory.mktemp("browser") / "work")
    cfg = load(None, [f"work={work}", *RIVAL_SETTINGS, f"evaluate.baseline={work / 'blank'}"])
    found = evaluate.run(cfg)
    reference_check.check_reference(cfg, work / "drafters" / "known", load_requests(cfg, "test")[0])
    path = publish(cfg, found["drafter_sha256"])
    assert path is not None
    assert path == found["report"], "evaluate has written it, too"
    return Path(path)


@pytest.fixture(scope="module")
def seen(page, tmp_path_factory):
    """What the browser measures: {width: {...}}."""
    return measured(tmp_path_factory.mktemp("harness"), page.read_text(), WIDTHS)


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_screen(seen, width):
    one = seen[width]
    assert width - 20 <= one["width"] <= width
    assert one["scroll"] <= one["width"]
    assert one["outside"] == []
    assert max(one["tables"]) <= one["width"]
    assert len(one["tables"]) >= 5


@pytest.mark.parametrize("width", WIDTHS)
def test_every_picture_has_a_size_and_readable_labels(seen, width):
    pictures = {one["id"]: one for one in seen[width]["pictures"]}
    assert set(pictures) == {"positions", "endings", "slices", "gains", "k"}
    for one in pictures.values():
        left, top, right, bottom = one["box"]
        assert right - left > 0.85 * min(width - 32, 400), one["id"]
        assert bottom - top > 100, one["id"]
        assert one["font"] > 9, one["id"]
        for text, (x0, y0, x1, y1) in one["texts"]:
            assert x0 >= left - 2, text
            assert x1 <= right + 2, text
            assert y0 >= top - 2, text
            assert y1 <= bottom + 2, text


@pytest.mark.parametrize("width", WIDTHS)
def test_labels_of_a_picture_do_not_overlap(seen, width):
    for one in seen[width]["pictures"]:
        texts = one["texts"]
        for i, (first, a) in enumerate(texts):
            for second, b in texts[i + 1 :]:
                wide = min(a[2], b[2]) - max(a[0], b[0])
                high = min(a[3], b[3]) - max(a[1], b[1])
                smaller = min((x[2] - x[0]) * (x[3] - x[1]) for x in (a, b))
                overlap = max(0, wide) * max(0, high)
                assert overlap < 0.2 * smaller, f"{one['id']}: {first!r} over {second!r}"


def test_it_prints(page, tmp_path):
    paper = tmp_path / "page.pdf"
    browse(tmp_path, f"--print-to-pdf={paper}", f"file://{page}")
    data = paper.read_bytes()
    assert data.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", data)) <= 12
