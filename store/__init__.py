"""The data layer: Parquet schemas, the commit protocol, the feature codec and log readers.

No Ray, no vLLM and no torch at import time.
"""
