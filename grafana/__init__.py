"""Dashboards, recording rules and alerts as code: ``python -m grafana.generate``."""
