"""`kvlens simulate`: vLLM's own scheduler and the connector, driven by a scenario file."""
