"""Upkeep of a work folder: what may be removed, what the feature cache keeps, and former layouts.
Imported by the stages gc, cache and migrate.
"""
