"""The page over HTTP: read-only, for browsers that reach this machine under a known name."""

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

from jobs.base.config import Config
from jobs.looking.looks import Looks
from jobs.looking.sections import SECTIONS
from jobs.reporting.templates import templates

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""No script, no fetch, no frame: what is shown came from outside, and is data."""
LOOPBACK = ["localhost", "127.0.0.1", "[::1]"]


def application(cfg: Config, looks: Looks) -> Starlette:
    """The app. A request with another Host than the loopback's, `ui.host` and `ui.names` is
    refused: another site cannot lead a browser here by a name of its own (DNS rebinding).
    """
    template = templates("jobs.looking", "jobs.reporting").get_template("ui.html")

    def page(request: Request) -> HTMLResponse:
        running = looks.refresh()
        found = [looks.sections[name] for name in SECTIONS if name in looks.sections]
        text = template.render(
            work=str(cfg.place()),
            sections=found,
            taken=looks.taken,
            running=running,
            warnings=[warning for section in found for warning in section.warnings],
        )
        return HTMLResponse(text, headers=HEADERS)

    host = f"[{cfg.ui.host}]" if ":" in cfg.ui.host else cfg.ui.host
    allowed = [*LOOPBACK, host, *cfg.ui.names]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=allowed, www_redirect=False)
    return Starlette(routes=[Route("/", page)], middleware=[hosts])
