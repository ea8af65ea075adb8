"""Layouts of all kinds, for tests that compare two ways of saying the same thing."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvlens.telemetry.records import GroupLayout, Layout

KINDS = ("full_attention", "sliding_window", "chunked_local", "mamba")


def random_layout(rng: random.Random, kinds: Sequence[str] = KINDS, retains: bool = True) -> Layout:
    """One to four groups, recurrent ones with equal chunks; ``retains``: beyond windows too."""
    groups = []
    state = rng.choice([2, 4, 8, 12, 16])
    for i in range(rng.randint(1, 4)):
        kind = rng.choice(kinds)
        chunk = state if kind == "mamba" else rng.choice([1, 2, 3, 4, 6, 8, 16])
        group = GroupLayout(i, kind, chunk, chunk, drafter_used=rng.random() < 0.35)
        if kind == "sliding_window":
            group.window = rng.randint(1, 20)
            group.extra_retained = rng.choice([0, 0, 1, 3]) if retains else 0
        if kind == "chunked_local":
            group.attention_chunk = rng.randint(1, 20)
        groups.append(group)
    return Layout(groups=groups, tokens_per_hash=1)
