"""How numbers, requests and chunks are shown, on pages and in terminals."""
