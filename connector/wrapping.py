"""``KVLensConnector``: any connector of vLLM, watched at ``interface`` depth.

No class of that name exists. vLLM asks its factory for the class of a configuration;
:func:`install` makes the factory answer with a subclass of the real one (``wrapped.py``)
where ``KVLensConnector`` or ``KVLENS_WRAP=1`` asks for it. All that vLLM finds out from a
connector's class is inherited, so nothing can be forgotten.

Only light modules are imported here: this runs in every process of vLLM, before its
configuration is made.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

from kvlens.connector import inner
from kvlens.telemetry.guard import raise_errors

logger = logging.getLogger(__name__)

_OURS = "kvlens.connector.offloading"
"""Classes from here record themselves, and deeper."""
_PATCHED = "_kvlens_wraps"
_classes: dict[type[Any], type[Any]] = {}
"""Real class -> ours."""
_names: dict[str, type[Any]] = {}
"""Class name -> ours: ``MultiConnector`` looks up by it whose stats it has."""


def install() -> None:
    """Make vLLM's factory answer with watched classes; any number of times."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory

    if getattr(factory, _PATCHED, False):
        return
    setattr(factory, _PATCHED, True)
    of_config = factory.get_connector_class
    of_name = factory.get_connector_class_by_name

    def get_connector_class(_cls: Any, kv_transfer_config: Any) -> Any:
        inner.resolve(kv_transfer_config)
        return _watched(of_config(kv_transfer_config), kv_transfer_config)

    def get_connector_class_by_name(_cls: Any, connector_name: str) -> Any:
        return _by_name(of_name, connector_name)

    factory.get_connector_class = classmethod(get_connector_class)
    factory.get_connector_class_by_name = classmethod(get_connector_class_by_name)
    if hasattr(factory, "supports_hma_config"):
        supports = factory.supports_hma_config

        def supports_hma_config(_cls: Any, kv_transfer_config: Any) -> Any:
            inner.resolve(kv_transfer_config)
            return supports(kv_transfer_config)

        factory.supports_hma_config = classmethod(supports_hma_config)
    if hasattr(KVTransferConfig, "has_connector"):
        has = KVTransferConfig.has_connector

        def has_connector(self: Any, connector_name: str) -> Any:
            inner.resolve(self)
            return has(self, connector_name)

        KVTransferConfig.has_connector = has_connector


def _wanted(kv_transfer_config: Any) -> bool:
    if os.environ.get(inner.WRAP_ENV) == "1":
        return True
    extra = kv_transfer_config.kv_connector_extra_config or {}
    if inner.has_inner(extra):
        return True
    children = extra.get(inner.CHILDREN)
    return (
        kv_transfer_config.kv_connector == inner.MULTI
        and isinstance(children, list)
        and any(map(inner.asks, children))
    )


def _watched(real: type[Any], kv_transfer_config: Any) -> type[Any]:
    try:
        if not _wanted(kv_transfer_config):
            return real
        ours = subclass(real)
        if _is_multi(real):
            _meet_children(kv_transfer_config)
        return ours
    except Exception:
        if raise_errors():
            raise
        logger.exception("kvlens cannot watch %s; it runs as without kvlens", real)
        return real


def subclass(real: type[Any]) -> type[Any]:
    """The class that vLLM gets for ``real``, always the same; ``real`` if it records itself."""
    if real in _classes.values() or any(base.__module__ == _OURS for base in real.__mro__):
        return real
    if real not in _classes:
        from kvlens.connector import wrapped

        build = wrapped.parent_class if _is_multi(real) else wrapped.watched_class
        _classes[real] = build(real)
    _names[real.__name__] = _classes[real]
    return _classes[real]


def _is_multi(real: type[Any]) -> bool:
    return any(base.__name__ == inner.MULTI for base in real.__mro__)


def _meet_children(kv_transfer_config: Any) -> None:
    """Know the children's classes by name before their first stats come."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for child in kv_transfer_config.kv_connector_extra_config.get(inner.CHILDREN) or ():
        # A child that cannot be made is vLLM's to complain of.
        with contextlib.suppress(Exception):
            KVConnectorFactory.get_connector_class(KVTransferConfig(**child))


def _by_name(of_name: Callable[[str], Any], name: str) -> Any:
    known = _names.get(name)
    try:
        real = of_name(name)
    except ValueError:
        if known is None:
            raise
        return known  # from a module of its own: without us it would have sent no stats
    if known is not None and known.__mro__[1] is real:
        return known
    return subclass(real) if os.environ.get(inner.WRAP_ENV) == "1" else real
