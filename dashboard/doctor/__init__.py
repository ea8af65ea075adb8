"""``kvlens doctor``: what one server's numbers say."""
