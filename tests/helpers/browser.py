"""A real browser, if there is one."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
NO_BROWSER = f"no browser here (looked for {', '.join(BROWSERS)})"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--no-pdf-header-footer",
]
# The page stands in a frame of each width (a headless window is never as narrow as a phone), and a
# script around it measures what the reader would see.
HARNESS = """<!doctype html><body>{frames}<pre id="found"></pre><script>
function box(e) {{ const b = e.getBoundingClientRect();
  return [b.left, b.top, b.right, b.bottom]; }}
function measure(frame) {{
  const page = frame.contentDocument, root = page.documentElement;
  return {{
    width: root.clientWidth,
    scroll: root.scrollWidth,
    outside: [...page.querySelectorAll("body *")].filter(e => !e.closest("svg, .scroll")
      && e.getBoundingClientRect().right > root.clientWidth + 1).map(e => e.outerHTML.slice(0, 80)),
    tables: [...page.querySelectorAll("table")].map(e => e.parentElement.clientWidth),
    text: page.body.innerText,
    pictures: [...page.querySelectorAll("figure")].map(figure => ({{
      id: figure.id, box: box(figure.querySelector("svg")),
      font: Math.min(...[...figure.querySelectorAll("text")].map(
        e => e.getBoundingClientRect().height)),
      texts: [...figure.querySelectorAll("text")].map(e => [e.textContent, box(e)]),
    }})),
  }};
}}
window.onload = () => {{ document.getElementById("found").textContent =
  JSON.stringify([...document.querySelectorAll("iframe")].map(measure)); }};
</script></body>"""


def browse(folder: Path, *arguments: str) -> str:
    """What the browser prints; its profile is in `folder`. A message in its console fails."""
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={folder / 'profile'}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def measured(folder: Path, page: str, widths: tuple[int, ...]) -> dict[int, dict[str, Any]]:
    """What the browser sees of the HTML text `page`: {width in pixels: {...}}."""
    text, style = html.escape(page), "height:900px;border:0"
    frames = [f'<iframe style="width:{w}px;{style}" srcdoc="{text}"></iframe>' for w in widths]
    harness = folder / "harness.html"
    harness.write_text(HARNESS.format(frames="".join(frames)))
    dom = browse(folder, "--window-size=1200,900", "--dump-dom", f"file://{harness}")
    found = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    assert found, dom[-2000:]
    return dict(zip(widths, json.loads(html.unescape(found[1])), strict=True))
