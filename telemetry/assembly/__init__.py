"""From ordered facts to one record per request; all of it runs on the drain thread."""
