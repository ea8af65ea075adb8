"""Telling people and other systems of incidents."""
