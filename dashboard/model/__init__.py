"""Plain data that every part of the dashboard speaks of; it imports nothing of them."""
