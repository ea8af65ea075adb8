"""Where finished records go: Prometheus (through vLLM), OTLP spans."""
