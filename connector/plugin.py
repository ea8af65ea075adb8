"""``vllm.general_plugins`` entry point: runs in every vLLM process, any number of times."""

from __future__ import annotations

import os
from typing import Any

from kvlens.connector import wrapping

NATIVE_ENV = "KVLENS_NATIVE"
"""``1``: ``--kv-offloading-backend native`` gets kvlens' connector too."""

_NAME = "KVLensOffloadingConnector"
_STOCK_NAME = "OffloadingConnector"


def _load() -> type[Any]:
    from kvlens.connector import KVLensOffloadingConnector

    return KVLensOffloadingConnector


def register_name() -> None:
    """Make the connector known to vLLM by its own name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory._registry[_NAME] = _load


def register() -> None:
    """Make our connectors known to vLLM by name, in place of others where that is wanted."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register_name()
    wrapping.install()
    if os.environ.get(NATIVE_ENV) == "1":
        KVConnectorFactory._registry[_STOCK_NAME] = _load
