"""Where numbers and spans go: Prometheus through vLLM, and OTLP."""
