"""Which fields of a request make an answer differ from the target's plain choice of tokens.

A greedy answer under a penalty, a grammar or a bias need not be the target's argmax. Replay stays
right for it, because the recorded token is the verdict. A check of who wrote the answer does not.
So the capture and ingest record the names of these fields, and whoever compares with the argmax
leaves such rows out.

Every field of vLLM 0.32's ChatCompletionRequest and CompletionRequest was looked at. These do not
change the choice of tokens, only the prompt, where the text ends, or how it is shown: stop and
stop_token_ids, ignore_eos (the end token still comes where it is the argmax), repetition_detection,
max_tokens, truncate_prompt_tokens, skip_special_tokens, logprobs, seed, n (each choice is a sample
of its own), length_penalty (beam search only), reasoning_effort, chat_template_kwargs. temperature,
top_p and top_k have columns of their own. An adapter is another model, with its own column
`adapter`.
"""

from collections.abc import Mapping
from typing import Any

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
    "min_p": (0.0,),  # keeps the argmax: left out at temperature 0
    "min_tokens": (0,),  # forbids the end token before so many tokens
    "bad_words": ([],),
    "allowed_token_ids": (),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "thinking_token_budget": (-1,),  # forces the end of thinking
    "vllm_xargs": ({},),  # for the server's own logits processors; their effect is unknown
    "logits_processors": ([],),  # in `defaults`: those the server was started with
    # Removed in vLLM 0.32, which ignores them; logs of older servers hold them.
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
}
"""Fields of a request (OpenAI's and vLLM's) -> their values that change nothing. An absent field
and null change nothing either."""
SAMPLER = ("temperature", "top_p", "top_k", "seed")
"""Fields that have columns of their own."""
FIELDS = (
    *NEUTRAL,
    "temperature",
    "response_format",
    "tool_choice",
    "tools",
    "parallel_tool_calls",
)
"""All that `shaped_by` reads of a request."""


def shaped_by(request: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Sorted names of the fields that shaped the answer; [] for the target's plain choice.

    defaults: the server's own sampling defaults (its generation_config.json), in force where the
    request says nothing; "tool_strict" in it says that the server constrains every tool call.
    One thing cannot be seen in a request: a grammar that the server adds to all requests (vLLM does
    so for targets served with Mistral's own tokenizer).
    """

    def value(name: str) -> Any:
        return defaults.get(name) if request.get(name) is None else request[name]

    found = {name for name, neutral in NEUTRAL.items() if not _is_one_of(value(name), neutral)}
    if _is_one_of(value("temperature"), (0.0,)) and value("temperature") is not None:
        found.discard("min_p")
    kind = request.get("response_format")
    kind = kind.get("type") if isinstance(kind, Mapping) else kind
    if kind not in (None, "text"):
        found.add("response_format")
    choice = request.get("tool_choice")
    if choice == "required" or isinstance(choice, Mapping):
        found.add("tool_choice")
    elif choice != "none" and request.get("tools"):
        single = request.get("parallel_tool_calls") is False
        if single or defaults.get("tool_strict") or _any_strict(request["tools"]):
            found.add("tools")
    return sorted(found)


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value is absent or neutral; "1.0" is 1.0, as vLLM reads it."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return False
    return value is None or value in neutral


def _any_strict(tools: Any) -> bool:
    """Whether a tool asks for `strict`, for which vLLM builds a grammar of its calls."""
    for tool in tools if isinstance(tools, list) else []:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and function.get("strict"):
            return True
    return False
