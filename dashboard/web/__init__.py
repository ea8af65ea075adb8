"""The web pages of the dashboard."""
