"""How a chat prompt ends, in the engine that serves and in the traffic that was harvested.

Between the user's words and the answer there are tokens of the chat template. Thinking modes differ
in just these: a drafter trained after "<think></think>" drafts badly after "<think>". The engine is
asked, because only it knows --chat-template and its default template arguments.
"""

from collections import Counter
from dataclasses import dataclass

from jobs.base.checks import Check
from jobs.base.config import Config
from jobs.dataset.samples import selected, with_tokens
from serving.client import Request, complete

MESSAGES = [{"role": "user", "content": "x"}]
MODES = (None, True, False)  # enable_thinking: not said, on, off


@dataclass(frozen=True)
class Endings:
    """Mode -> token ids that end a prompt: by the engine, and by the target folder's template."""

    engine: dict[bool | None, list[int]]
    folder: dict[bool | None, list[int]]


def ask_endings(cfg: Config, url: str) -> Endings | None:
    """Ask the server and the folder's tokenizer; None for a target without a chat template."""
    from transformers import AutoTokenizer  # as in dflash/target_model.py

    tokenizer = AutoTokenizer.from_pretrained(cfg.target_path, local_files_only=True)
    if not tokenizer.chat_template:
        return None

    def folder(mode: bool | None, prompt: bool) -> list[int]:
        return tokenizer.apply_chat_template(
            MESSAGES, add_generation_prompt=prompt, return_dict=False, **_thinking(mode)
        )

    def engine(mode: bool | None, prompt: bool) -> list[int]:
        extra = {"add_generation_prompt": prompt, "chat_template_kwargs": _thinking(mode)}
        ask = Request(prompt=MESSAGES, max_tokens=1, extra=extra)
        return complete(url, [ask], 1)[0].prompt_ids

    return Endings(
        *({m: _ending(ids(m, False), ids(m, True)) for m in MODES} for ids in (engine, folder))
    )


def _thinking(mode: bool | None) -> dict[str, bool]:
    return {} if mode is None else {"enable_thinking": mode}


def _ending(without: list[int], prompt: list[int]) -> list[int]:
    """The tokens that the generation prompt appends; [] if it also changes earlier ones."""
    return prompt[len(without) :] if prompt[: len(without)] == without else []


def check_template(cfg: Config, endings: Endings | None) -> Check:
    """Check that every recorded chat prompt ends as the engine ends one in the same mode."""
    if endings is None:
        return Check("template", "the target has no chat template", "skip")
    rows = selected(cfg, "train")
    found: Counter[str] = Counter()
    for batch in with_tokens(cfg, rows, ["prompt_ids", "thinking"]):
        prompts, modes = batch["prompt_ids"].to_pylist(), batch["thinking"].to_pylist()
        found.update(judge(endings, p, mode) for p, mode in zip(prompts, modes, strict=True))
    text = (
        f"{found['same']} of {rows.num_rows} training prompts end as the engine ends them, "
        f"{found['other']} otherwise, {found['none']} are not chat prompts"
    )
    if found["other"]:
        fix = (
            "serve with the chat template and thinking mode of the traffic (serve.args: "
            "--chat-template, --default-chat-template-kwargs), or train on traffic of this mode"
        )
        return Check("template", text, "fail", fix)
    return Check("template", text, "ok" if found["same"] else "skip")


def judge(endings: Endings, prompt: list[int], mode: bool | None) -> str:
    """`same` as the engine, `other` (as in another mode, or as by the folder's template), or `none`
    (not a chat prompt).
    """
    if _ends(prompt, endings.engine[mode]):
        return "same"
    known = [*endings.engine.values(), *endings.folder.values()]
    return "other" if any(_ends(prompt, ending) for ending in known) else "none"


def _ends(prompt: list[int], ending: list[int]) -> bool:
    return bool(ending) and prompt[-len(ending) :] == ending
