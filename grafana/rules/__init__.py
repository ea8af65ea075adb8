"""Rule files for Prometheus, generated; shipped with the dashboard."""
