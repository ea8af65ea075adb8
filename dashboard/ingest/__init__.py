"""From OTLP to the store."""
