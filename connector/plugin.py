"""``vllm.general_plugins`` entry point: runs in every vLLM process, any number of times."""

from __future__ import annotations

import os
from typing import Any

NATIVE_ENV = "KVLENS_NATIVE"
"""``1``: ``--kv-offloading-backend native`` gets kvlens' connector too."""

_NAME = "KVLensOffloadingConnector"
_STOCK_NAME = "OffloadingConnector"


def _load() -> type[Any]:
    from kvlens.connector import KVLensOffloadingConnector

    return KVLensOffloadingConnector


def register() -> None:
    """Make the connector known to vLLM by name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory._registry[_NAME] = _load
    if os.environ.get(NATIVE_ENV) == "1":
        KVConnectorFactory._registry[_STOCK_NAME] = _load
