"""One log with vLLM: kvlens' lines go where vLLM's own go, in its format."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def quiet() -> Iterator[None]:
    """Leave vLLM's log and kvlens' to errors, unless told otherwise: the report is the output."""
    wanted = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}  # read when vLLM is imported
    added = wanted.keys() - os.environ.keys()
    os.environ.update({name: wanted[name] for name in added})
    level = os.environ["VLLM_LOGGING_LEVEL"]
    loggers = [logging.getLogger(name) for name in ("vllm", "kvlens")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
        for logger, old in zip(loggers, before, strict=True):
            logger.setLevel(old)
