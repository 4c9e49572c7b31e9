"""What makes an answer other than the target's plain choice, by the names of the request.

A greedy answer under a penalty, a grammar or a bias is not the target's argmax, and need not be:
replay stays right for it (the recorded token is the verdict), a check of identity does not. So the
capture and ingest write down the names, and whoever compares with the argmax leaves such rows out.
"""

from collections.abc import Mapping
from typing import Any

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
    "min_p": (0.0,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "ignore_eos": (False,),
    "thinking_token_budget": (),
    "vllm_xargs": ({},),
}
"""Fields of a request (OpenAI's and vLLM's) -> their values that change nothing; absent and null
never do."""
SHAPING_FORMATS = ("json_object", "json_schema", "structural_tag", "regex", "grammar", "choice")


def shaped_by(request: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Sorted names of what shaped the answer; [] for the plain choice of the target.

    defaults: the server's own sampling defaults (its generation_config.json), in force where the
    request says nothing. n > 1 is no shaping: each choice is a sample of its own.
    """
    found = set()
    for name, neutral in NEUTRAL.items():
        value = request.get(name)
        value = defaults.get(name) if value is None else value
        if value is not None and value not in neutral:
            found.add(name)
    kind = request.get("response_format")
    kind = kind.get("type") if isinstance(kind, Mapping) else kind
    if kind in SHAPING_FORMATS:
        found.add("response_format")
    choice = request.get("tool_choice")
    if choice == "required" or isinstance(choice, Mapping):
        found.add("tool_choice")
    return sorted(found)
