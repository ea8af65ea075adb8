"""Numbers of vLLM servers, stock or instrumented, from their ``/metrics``."""
