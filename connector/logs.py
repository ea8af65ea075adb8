"""One log with vLLM: kvlens' lines go where vLLM's own go, in its format."""

from __future__ import annotations

import logging

_OURS, _THEIRS = "kvlens", "vllm"


def join_vllm() -> None:
    """Give kvlens' loggers vLLM's handlers and level, unless they have their own."""
    ours, theirs = logging.getLogger(_OURS), logging.getLogger(_THEIRS)
    if ours.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = theirs.propagate
