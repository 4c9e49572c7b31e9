"""Logs to traffic: the rules, the Ray tasks that read logs, and counts of accepted and rejected
records. Only the stage `ingest` imports it; it imports `base`. Log formats are in store/.
"""
