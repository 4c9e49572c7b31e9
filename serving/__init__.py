"""What lives in or beside the vLLM process: plugin, capture, extraction, server, client."""
