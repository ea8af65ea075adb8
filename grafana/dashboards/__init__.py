"""Boards for Grafana, generated; shipped with the dashboard."""
