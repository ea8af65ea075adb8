"""REST, the event stream and self-metrics."""
