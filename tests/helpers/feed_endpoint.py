"""ASGI middleware that answers GET /test/acceptance?N with what the acceptance feed has after N."""

import json

from serving import acceptance_feed


class FeedEndpoint:
    """For tests: the feed of a real server, without its admin endpoints."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        """Serve one connection."""
        if scope["type"] != "http" or not scope["path"].endswith("/test/acceptance"):
            await self.app(scope, receive, send)
            return
        body = json.dumps(acceptance_feed.read(int(scope["query_string"] or b"0"))).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})
