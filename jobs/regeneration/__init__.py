"""Prompts of former targets and of text logs, answered anew by the present one. The stages
`regenerate` and `ingest` (which keeps tokenizers) and the pipeline `retrain` import it; it imports
`servers` and the rooms below it.
"""
