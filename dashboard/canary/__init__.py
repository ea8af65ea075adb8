"""``kvlens canary``: is reloaded KV right? The same greedy prompts, reloaded and recomputed."""
