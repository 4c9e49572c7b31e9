"""Why a record is not learned from: every reason, its class, its meaning and what to do.

Two classes. A *damaged* record is unreadable or cannot be trusted: it counts against
ingest.max_reject_rate, and its bytes are kept in rejects/. Any other record is readable and merely
not for this drafter: it is counted, nothing of it is kept, and it never stops anything.
"""

from dataclasses import dataclass

MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Reason:
    """`damaged` is the class; `fix` says what to do when ingest stops for this reason."""

    damaged: bool
    meaning: str
    fix: str


_LOOK = "look at the named place of the log"

REASONS = {
    # damaged or not to be trusted
    "not_json": Reason(True, "the line is not a JSON value", _LOOK),
    "cut_line": Reason(
        True, "the last line ends inside a JSON value (writer killed, or still writing)", _LOOK
    ),
    "torn_line": Reason(
        True, "a record torn by the next one (disk full, writer killed); the next is used", _LOOK
    ),
    "damaged_file": Reason(
        True, "a compressed file that is cut or damaged; what is before is used", "copy it again"
    ),
    "line_too_long": Reason(True, f"a record of more than {MAX_LINE_BYTES >> 20} MiB", _LOOK),
    "not_an_object": Reason(True, "JSON, but not an object", _LOOK),
    "unknown_format": Reason(
        True, "an object of no known format", "docs/how-to/log-formats.md lists what is read"
    ),
    "unknown_role": Reason(
        True, "a role that is not known", "name the roles as OpenAI's API or ShareGPT does"
    ),
    "bad_text": Reason(True, "text that is not valid Unicode", _LOOK),
    "bad_row": Reason(True, "a row of a CSV file that does not fit its header", _LOOK),
    "unknown_version": Reason(
        True, "a capture record of another format version", "ingest it with a release that reads it"
    ),
    "bad_token_ids": Reason(True, "token ids that are not a list of integers", _LOOK),
    "token_outside_vocabulary": Reason(
        True, "an id the target does not have", "set target.path to the folder that was served"
    ),
    "other_model": Reason(
        True,
        "another model answered than was asked for",
        "if these names are the target's, list them in ingest.models",
    ),
    "finish_unknown": Reason(True, "a finish reason that is not known", _LOOK),
    "bad_field": Reason(True, "a field of the wrong type or range", _LOOK),
    "duplicate_field": Reason(True, "a field that is there twice, with two values", _LOOK),
    # readable, but not for this drafter
    "no_consent": Reason(
        False,
        "the owner did not agree",
        "anything but a clear yes is a no: see what sets the consent field",
    ),
    "redacted": Reason(
        False,
        "its text was redacted: its tokens must not be learned from",
        "log requests whose owners agree, without redaction",
    ),
    "other_file": Reason(
        False, "a file of another kind", "docs/how-to/log-formats.md lists what is read"
    ),
    "raw_prompt": Reason(
        False,
        "a prompt of /v1/completions as text: its messages and token ids are not known",
        'log with "return_token_ids": true',
    ),
    "no_answer": Reason(
        False, "no turn that asks for an answer, or an empty answer", "log whole conversations"
    ),
    "not_text": Reason(False, "pictures, sound or files in a message", "log conversations of text"),
    "no_content": Reason(
        False, "neither messages nor answers in the record", "switch the logging of contents on"
    ),
    "not_generation": Reason(False, "no answer of a model", "nothing: such records are usual"),
    "cache_hit": Reason(
        False, "answered from a cache, so the first answer counts", "nothing: they are usual"
    ),
    "ids_incomplete": Reason(
        False,
        "fewer or more token ids than the server counted",
        'ask with "include_reasoning": true, and stream with --stream-interval 1',
    ),
    "template": Reason(
        False, "the target's chat template does not take these messages", "log fewer kinds of turns"
    ),
    "control_text": Reason(
        False,
        "a message holds the text of a control token of the target",
        "ids of such a text are not those that were served: capture token ids",
    ),
    "no_token_ids": Reason(
        False, "no prompt or output token ids", 'serve or ask with "return_token_ids": true'
    ),
    "other_target": Reason(
        False,
        "the record names another target_id",
        "set target.path to the folder that was served, or ingest newer logs",
    ),
    "adapter": Reason(
        False,
        "served with a LoRA adapter: not the target's own output",
        "log answers without an adapter",
    ),
    "not_in_models": Reason(
        False, "a model that ingest.models does not list", "list the target's names there"
    ),
    "empty_loss_mask": Reason(False, "no output token, so nothing to learn from", "log answers"),
    "short_output": Reason(
        False,
        "fewer output tokens than ingest.min_output_tokens",
        "lower ingest.min_output_tokens, or log longer answers",
    ),
    "finish_error": Reason(False, "the request failed", "see the server's log"),
    "finish_content_filter": Reason(False, "the answer was filtered", "log unfiltered answers"),
}


def reason_of(name: str) -> Reason:
    """The table's row of a reason, which may carry the field's name: "bad_field:top_k"."""
    return REASONS[name.partition(":")[0]]
