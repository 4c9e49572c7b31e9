"""Arrow schemas of every dataset. Writers use them explicitly, nothing is inferred.

Times are microseconds in UTC. Token ids are int32. `loss_mask` holds half-open spans over the
positions of prompt + output. A column has a comment only where its name does not say what it holds.
"""

import pyarrow as pa
from pyarrow.compute import call_function

TIMESTAMP = pa.timestamp("us", tz="UTC")
LAYOUT_VERSION = "2"

TRAFFIC = pa.schema(
    [
        ("sample_id", pa.string()),
        ("conversation_id", pa.string()),
        ("split", pa.string()),  # train | val | test, of the group (store/groups.py)
        ("domain", pa.string()),
        ("source", pa.string()),  # log format: capture | openai
        ("captured_at", TIMESTAMP),
        ("target_id", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("output_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32())]))),
        ("ids_source", pa.string()),  # served | regenerated | reencoded
        ("finish_reason", pa.string()),
        ("temperature", pa.float32()),
        ("top_p", pa.float32()),
        ("top_k", pa.int32()),
        ("seed", pa.int64()),
        ("thinking", pa.bool_()),
        ("tenant", pa.string()),
        ("consent", pa.bool_()),
        ("repeat_count", pa.int32()),  # how often this exact sample was seen
        ("request_id", pa.string()),
        ("adapter", pa.string()),
        ("language", pa.string()),  # as the log names it; nothing guesses it
        ("shaped", pa.string()),  # store/shaped_answers.py, comma separated; "" none, null: unknown
        ("split_by_prompt", pa.string()),  # side of the prompt, for when the label says nothing
        ("log", pa.string()),  # key of the log's state in LOGS
        ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("prompt_id", pa.string()),  # of the prompt's token ids (store/ids.py)
    ]
)

TEXTS = pa.schema(
    [
        ("text_id", pa.string()),  # of messages, tools and answers
        ("conversation_id", pa.string()),
        ("domain", pa.string()),
        ("language", pa.string()),
        ("tenant", pa.string()),
        ("source", pa.string()),  # log format, a name of store/record_readers.py
        ("captured_at", TIMESTAMP),
        ("consent", pa.bool_()),
        ("request_id", pa.string()),
        ("model", pa.string()),  # what answered, as the log names it
        ("thinking", pa.bool_()),
        ("temperature", pa.float32()),
        ("top_p", pa.float32()),
        ("top_k", pa.int32()),
        ("seed", pa.int64()),
        ("finish_reason", pa.string()),
        ("messages", pa.string()),  # JSON, in the form of store/chat_messages.py
        ("tools", pa.string()),  # JSON
        ("answers", pa.list_(pa.int32())),  # n: the first n messages are a prompt to answer anew
        ("answer_tokens", pa.int32()),  # of the log's answers, as it counts or by their length
        ("repeat_count", pa.int32()),
        ("log", pa.string()),  # key of the log's state in LOGS
    ]
)

LOGS = pa.schema(
    [
        ("log", pa.string()),  # of content, rules and version of the parsing
        ("path", pa.string()),  # one of the paths that it was found at
        ("target_id", pa.string()),
        ("bytes", pa.int64()),  # of the content, decompressed
        ("sha256", pa.string()),  # of the content, decompressed
        ("rules", pa.string()),  # JSON
        ("reading", pa.int32()),  # version of the parsing
        ("counts", pa.string()),  # JSON: records by outcome
        ("names", pa.string()),  # JSON: what was found under a reason
        ("examples", pa.string()),  # JSON: reason -> place of its first record
        ("ingested_at", TIMESTAMP),
    ]
)

SELECTION = pa.schema(
    [
        ("sample_id", pa.string()),
        ("target_id", pa.string()),
        ("split", pa.string()),  # train | val | test, of the group (store/groups.py)
        ("domain", pa.string()),
        ("conversation_id", pa.string()),
        ("captured_at", TIMESTAMP),
        ("temperature", pa.float32()),
        ("shaped", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("loss_mask", pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32())]))),
        ("repeat_count", pa.int32()),  # over all logs
        ("thinking", pa.bool_()),
        ("language", pa.string()),
        ("tenant", pa.string()),
    ]
)

FEATURE_INDEX = pa.schema(
    [
        ("features_key", pa.string()),  # folder below features/
        ("sample_id", pa.string()),
        ("n_tokens", pa.int32()),
        ("file", pa.string()),
        ("row_group", pa.int32()),
        ("file_bytes", pa.int64()),
        ("e_tag", pa.string()),  # of the file when it was known to be intact
        ("harvested_at", TIMESTAMP),
    ]
)

STAGES = pa.schema(
    [
        ("stage", pa.string()),
        ("started_at", TIMESTAMP),
        ("finished_at", TIMESTAMP),
        ("ok", pa.bool_()),
        ("who", pa.string()),
        ("summary", pa.string()),  # JSON: what the stage returned
    ]
)

FEATURES = pa.schema(
    [
        ("sample_id", pa.string()),
        ("n_tokens", pa.int32()),
        ("ids_digest", pa.binary(16)),  # of the token ids that the features were made from
        # Features [n_tokens, n_taps * hidden] in the dtype of the metadata (store/feature_codec.py)
        ("hi", pa.large_binary()),  # bfloat16: their high bytes; float8_e4m3fn: their bytes
        ("lo", pa.large_binary()),  # low bytes; scales, float32 [n_tokens, n_taps]
        ("digest", pa.binary(8)),  # of hi and lo, seeded with the sample (store/features.py)
    ]
)
TOP = [
    ("top_ids", pa.list_(pa.int32())),  # [n_output, top_k], flat: likeliest tokens, best first
    ("top_logprobs", pa.list_(pa.float16())),  # their log-probabilities at temperature 1
    ("top_digest", pa.binary(4)),  # of both, seeded with the sample
]

SET_ASIDE = pa.schema(
    [
        ("sample_id", pa.string()),
        ("target_id", pa.string()),
        ("features_key", pa.string()),  # folder of features/ that it was left out of
        ("domain", pa.string()),
        ("reason", pa.string()),  # jobs/harvesting/screening.py
        ("detail", pa.string()),  # JSON: the numbers that decided
        ("tokens", pa.int32()),  # prompt + output
        ("found_at", TIMESTAMP),
        (
            "backend",
            pa.string(),
        ),  # harvest.backend; null: an older row
        ("dtype", pa.string()),  # compute dtype of that backend
    ]
)

ACCEPTANCE = pa.schema(
    [
        ("request_id", pa.string()),
        ("sample_id", pa.string()),
        ("conversation_id", pa.string()),
        ("origin", pa.string()),  # replay | decode | served
        ("drafter_version", pa.string()),  # of dflash.checkpoint.drafter_sha256
        ("target_id", pa.string()),
        ("domain", pa.string()),
        ("k", pa.int32()),
        ("block_size", pa.int32()),
        ("temperature", pa.float32()),
        ("accepted", pa.list_(pa.int16())),  # per round, already cut at the end of text
        ("drafted", pa.list_(pa.int16())),
        ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("started_at", TIMESTAMP),
        ("finished_at", TIMESTAMP),
        ("replica", pa.string()),
        ("repeat_count", pa.int32()),  # how often traffic has this sample
        ("batch", pa.string()),  # of what was measured together, and is replaced together
        # Of production only: null in rows that a command measured.
        ("log", pa.string()),  # key of the log's state in LOGS
        ("version", pa.string()),  # of the drafter, as the server names it
        ("concurrency", pa.int32()),  # requests in flight on the replica when it ended
    ]
)

PROMOTIONS = pa.schema(
    [
        ("number", pa.int32()),
        ("decided_at", TIMESTAMP),
        ("action", pa.string()),  # promote | hold | refuse | rollback | rollout-...
        ("who", pa.string()),
        ("model", pa.string()),
        ("from_version", pa.string()),  # champion in the registry before the decision
        ("from_drafter", pa.string()),  # the same as drafter_version in acceptance rows
        ("to_version", pa.string()),  # what was decided about
        ("to_drafter", pa.string()),
        ("reason", pa.string()),
        ("evidence", pa.string()),  # JSON
        ("lease", pa.int64()),  # fencing number of the lease that it was decided under
    ]
)

WINDOWS = pa.schema(
    [
        ("window", pa.int32()),
        ("place", pa.int32()),  # of the step in its window, from 0
        ("step", pa.string()),  # window (the whole of it) | ingest | select | ... | rollout
        ("state", pa.string()),  # store/windows.py has the states of windows and of steps
        ("reason", pa.string()),
        ("target_id", pa.string()),
        # The window's samples: those in to_version of traffic/ that from_version lacks.
        ("from_version", pa.int64()),
        ("to_version", pa.int64()),
        ("captured_from", TIMESTAMP),  # the earliest and latest of them; nothing is decided by it
        ("captured_to", TIMESTAMP),
        ("started_at", TIMESTAMP),
        ("seconds", pa.float64()),
        ("numbers", pa.string()),  # JSON: what later steps and questions need
        ("lease", pa.int64()),  # fencing number of the lease under which the row was written
    ]
)

REJECTS = pa.schema(
    [
        ("log", pa.string()),  # key of the log's state in LOGS
        ("file", pa.string()),
        ("offset", pa.int64()),  # byte offset of the first byte of `raw` in the file
        ("reason", pa.string()),
        (
            "raw",
            pa.binary(),
        ),  # the bytes, cut at store.log_formats.MAX_REJECT_BYTES, or empty
    ]
)

TABLES = {
    "traffic": TRAFFIC,
    "texts": TEXTS,
    "rejects": REJECTS,
    "logs": LOGS,
    "selection": SELECTION,
    "feature_index": FEATURE_INDEX,
    "set_aside": SET_ASIDE,
    "acceptance": ACCEPTANCE,
    "promotions": PROMOTIONS,
    "stages": STAGES,
    "windows": WINDOWS,
}
"""Every narrow table of a work folder, by name; store/tables.py reads and writes them."""


def features_columns(top_k: int) -> pa.Schema:
    """FEATURES, with the columns TOP where log-probabilities are captured (top_k > 0)."""
    return pa.schema([*FEATURES, *TOP]) if top_k else FEATURES


def features_schema(
    target_id: str,
    target_layer_ids: list[int],
    hidden_size: int,
    dtype: str = "bfloat16",
    top_k: int = 0,
) -> pa.Schema:
    """The columns and the metadata every shard must carry (compared by readers, never guessed)."""
    metadata = {
        "target_id": target_id,
        "target_layer_ids": ",".join(str(i) for i in target_layer_ids),
        "dtype": dtype,
        "hidden_size": str(hidden_size),
        "layout_version": LAYOUT_VERSION,
    }
    return features_columns(top_k).with_metadata(
        metadata | ({"top_k": str(top_k)} if top_k else {})
    )


def count_tokens(table: pa.Table) -> int:
    """Tokens in a table of any schema above: prompt + output, or n_tokens; 0 if it has neither."""
    names = set(table.column_names)
    lengths = [
        call_function("list_value_length", [table[name]])
        for name in ("prompt_ids", "output_ids")
        if name in names
    ]
    counts = [
        table[name] for name in ("n_tokens", "prompt_tokens", "output_tokens") if name in names
    ]
    return sum(call_function("sum", [column]).as_py() or 0 for column in lengths + counts)
