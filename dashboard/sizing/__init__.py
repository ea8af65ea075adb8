"""``kvlens size`` and the dashboard's curve: table, JSON and picture of a sizing."""
