"""Logs to traffic: the rules, the Ray tasks that read logs, and what became of their records. Only
the stage `ingest` imports it; it imports `base` and `dataset`. Log formats are in store/.
"""
