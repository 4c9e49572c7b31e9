"""What stages read of the work folder: samples with their features, questions to DuckDB, rows of
acceptance, and the slices that people look at. Every other room may import it; it imports `base`.
"""
