"""A bare ASGI application with an engine like vLLM's, for tests of the middlewares around it."""

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def metrics(accepted, drafted):
    """As vLLM counts the steps of one choice."""
    histogram = [accepted.count(n) for n in range(8)]
    return SimpleNamespace(
        histogram=histogram, per_step_accepted=accepted, per_step_drafted=drafted
    )


def output(index, ids, finish=None, spec=None, latency=0.0):
    """One output of the engine, for one choice."""
    part = SimpleNamespace(
        index=index, token_ids=ids, finish_reason=finish, spec_decode_metrics=spec
    )
    return SimpleNamespace(
        outputs=[part],
        prompt_token_ids=[1, 5, 6],
        metrics=SimpleNamespace(first_token_latency=latency),
    )


class VLLMClientError(Exception):
    """Named as vLLM's."""


class FakeEngine:
    """`generate` yields `outputs`, one list for each prompt; an exception among them is raised."""

    def __init__(self, *outputs, n=1, kind="DELTA"):
        self.outputs, self.closed = outputs, 0
        self.meanwhile: Callable[[], Any] | None = None
        kinds = SimpleNamespace(name=kind)
        self.params = SimpleNamespace(n=n, temperature=0.5, output_kind=kinds)

    async def generate(self, prompt, sampling_params, request_id, *, lora_request=None):
        """The outputs of one prompt."""
        try:
            for one in self.outputs[prompt]:
                await asyncio.sleep(0)
                if isinstance(one, BaseException):
                    raise one
                yield one
        finally:
            self.closed += 1


class EngineApp:
    """Asks the engine for every prompt, as vLLM's serving classes do, and streams its token ids."""

    def __init__(self, engine, k=7, name="chatcmpl-9", stop_after=None):
        self.engine, self.name, self.stop_after = engine, name, stop_after
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=k) if k else None,
            model_config=SimpleNamespace(is_multimodal_model=False, enable_prompt_embeds=False),
        )
        self.state = SimpleNamespace(engine_client=engine, vllm_config=config)
        self.bodies = []

    async def __call__(self, scope, receive, send):
        """Serve one request."""
        self.bodies.append((await receive())["body"])
        prompts = range(len(self.engine.outputs))
        names = [self.name if self.name.startswith("chat") else f"{self.name}-{i}" for i in prompts]
        answers = [
            self.engine.generate(i, self.engine.params, name)
            for i, name in zip(prompts, names, strict=True)
        ]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        sent = 0
        for prompt, answer in enumerate(answers):
            async for one in answer:
                if sent == self.stop_after:
                    raise asyncio.CancelledError
                sent += 1
                part = {"type": "http.response.body", "more_body": True}
                await send(part | {"body": self._event(prompt, one.outputs[0])})
            if self.engine.meanwhile:
                self.engine.meanwhile()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _event(self, prompt, part):
        choice = {
            "index": prompt * self.engine.params.n + part.index,
            "token_ids": part.token_ids,
            "prompt_token_ids": [1, 5, 6],
            "finish_reason": part.finish_reason,
        }
        return b"data: " + json.dumps({"id": self.name, "choices": [choice]}).encode() + b"\n\n"
