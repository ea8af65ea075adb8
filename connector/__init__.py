"""Connectors that run inside vLLM: a corrected ``OffloadingConnector``, and any, watched.

vLLM is imported only when the connector class is asked for, so that the rest
of kvlens can read this package's configuration without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlens.connector import config, versions

if TYPE_CHECKING:
    from kvlens.connector.host_memory import HostMemoryOffloadingSpec
    from kvlens.connector.offloading import KVLensOffloadingConnector

__all__ = ["HostMemoryOffloadingSpec", "KVLensOffloadingConnector"]


def __getattr__(name: str) -> Any:
    try:
        if name == "KVLensOffloadingConnector":
            from kvlens.connector.offloading import KVLensOffloadingConnector

            return KVLensOffloadingConnector
        if name == "HostMemoryOffloadingSpec":
            from kvlens.connector.host_memory import HostMemoryOffloadingSpec

            return HostMemoryOffloadingSpec
        if name == "KVLensConnector":
            # With the plugin vLLM never gets here: its factory answers for the name.
            raise config.ConfigError(
                "KVLensConnector is a plugin of vLLM and VLLM_PLUGINS leaves it out: add "
                '"kvlens" to that variable, or unset it'
            )
    except ImportError as error:
        raise versions.UnsupportedVLLMError(
            f"kvlens' connector does not fit the vLLM that is installed here, if one is ({error}). "
            f"It is tested with vLLM {versions.RANGE}."
        ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
