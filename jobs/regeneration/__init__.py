"""Prompts of a former target, answered anew by the present one. The stages `regenerate` and
`ingest` (which keeps tokenizers) and the pipeline `retrain` import it; it imports `servers` and the
rooms below it.
"""
