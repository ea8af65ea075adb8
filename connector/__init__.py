"""The corrected, observable ``OffloadingConnector``: runs inside vLLM.

vLLM is imported only when the connector class is asked for, so that the rest
of kvlens can read this package's configuration without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlens.connector.host_memory import HostMemoryOffloadingSpec
    from kvlens.connector.offloading import KVLensOffloadingConnector

__all__ = ["HostMemoryOffloadingSpec", "KVLensOffloadingConnector"]


def __getattr__(name: str) -> Any:
    if name == "KVLensOffloadingConnector":
        from kvlens.connector.offloading import KVLensOffloadingConnector

        return KVLensOffloadingConnector
    if name == "HostMemoryOffloadingSpec":
        from kvlens.connector.host_memory import HostMemoryOffloadingSpec

        return HostMemoryOffloadingSpec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
