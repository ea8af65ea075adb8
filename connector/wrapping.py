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
import copy
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvlens.connector import config
from kvlens.telemetry.guard import raise_errors

logger = logging.getLogger(__name__)

NAME = "KVLensConnector"
WRAP_ENV = "KVLENS_WRAP"
"""``1``: whatever connector is configured is watched."""
_OURS = "kvlens.connector.offloading"
"""Classes from here record themselves, and deeper."""
_MULTI = "MultiConnector"
_CHILDREN = "connectors"
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
        resolve(kv_transfer_config)
        return _watched(of_config(kv_transfer_config), kv_transfer_config)

    def get_connector_class_by_name(_cls: Any, connector_name: str) -> Any:
        return _by_name(of_name, connector_name)

    factory.get_connector_class = classmethod(get_connector_class)
    factory.get_connector_class_by_name = classmethod(get_connector_class_by_name)
    if hasattr(factory, "supports_hma_config"):
        supports = factory.supports_hma_config

        def supports_hma_config(_cls: Any, kv_transfer_config: Any) -> Any:
            resolve(kv_transfer_config)
            return supports(kv_transfer_config)

        factory.supports_hma_config = classmethod(supports_hma_config)
    if hasattr(KVTransferConfig, "has_connector"):
        has = KVTransferConfig.has_connector

        def has_connector(self: Any, connector_name: str) -> Any:
            resolve(self)
            return has(self, connector_name)

        KVTransferConfig.has_connector = has_connector


def resolve(kv_transfer_config: Any) -> None:
    """Put the real connector's name, module and settings where vLLM looks for them.

    vLLM asks by name in many places (HMA, NIXL, MultiConnector): each sees the real one.
    The ``kvlens`` section stays in the extra config; its ``inner`` says who is to be watched.
    """
    if kv_transfer_config is None:
        return
    extra = kv_transfer_config.kv_connector_extra_config or {}
    if kv_transfer_config.kv_connector == NAME:
        inner = _inner(extra)
        kv_transfer_config.kv_connector = inner.name
        kv_transfer_config.kv_connector_module_path = inner.module_path
        extra = {**inner.extra_config, config.SECTION: extra[config.SECTION]}
        kv_transfer_config.kv_connector_extra_config = extra
    children = extra.get(_CHILDREN)
    if kv_transfer_config.kv_connector == _MULTI and isinstance(children, list):
        resolved = _resolved_children(children, extra)
        if resolved != children:
            kv_transfer_config.kv_connector_extra_config = {**extra, _CHILDREN: resolved}


def _resolved_children(children: list[Any], extra: Mapping[str, Any]) -> list[Any]:
    """Children of ``MultiConnector``: all are watched if it is, else those that ask for it."""
    section = extra[config.SECTION] if _has_inner(extra) else None
    resolved = [_resolved_child(child, section) for child in children]
    if os.environ.get(WRAP_ENV) == "1":
        return resolved  # all have our class anyway
    watched = {child["kv_connector"] for child in resolved if _asks(child)}
    # Stats of one class are added up, and its metrics made once: all of it have our class.
    silent = {"telemetry": False}
    return [
        _resolved_child(child, silent)
        if isinstance(child, Mapping) and child.get("kv_connector") in watched
        else child
        for child in resolved
    ]


def _inner(extra: Mapping[str, Any]) -> config.Inner:
    section = extra.get(config.SECTION)
    inner = section.get("inner") if isinstance(section, Mapping) else None
    try:
        if inner is None:
            raise msgspec.ValidationError("there is none")
        found = msgspec.convert(inner, config.Inner)
        if found.name == NAME:
            raise msgspec.ValidationError(f"{NAME} cannot watch itself")
    except msgspec.ValidationError as error:
        raise config.ConfigError(
            f"{NAME} needs the connector that it is to watch ({error}): write "
            f'"kv_connector_extra_config": {{"{config.SECTION}": {{"inner": {{"name": '
            '"OffloadingConnector", "module_path": null, "extra_config": {}}}} with the name, '
            "module path (null: one of vLLM's own) and extra config of that connector, or "
            f"configure that one and set {WRAP_ENV}=1"
        ) from error
    return found


def _has_inner(extra: Mapping[str, Any] | None) -> bool:
    section = (extra or {}).get(config.SECTION)
    return isinstance(section, Mapping) and section.get("inner") is not None


def _asks(child: Any) -> bool:
    return isinstance(child, Mapping) and _has_inner(child.get("kv_connector_extra_config"))


def _resolved_child(child: Any, section: Mapping[str, Any] | None) -> Any:
    """A child of ``MultiConnector``; with a ``section``, that of its parent, it is watched too."""
    if not isinstance(child, Mapping):
        return child  # vLLM will say what is wrong with it
    extra = child.get("kv_connector_extra_config") or {}
    if child.get("kv_connector") == NAME:
        inner = _inner(extra)
        return {
            **child,
            "kv_connector": inner.name,
            "kv_connector_module_path": inner.module_path,
            "kv_connector_extra_config": {
                **inner.extra_config,
                config.SECTION: extra[config.SECTION],
            },
        }
    own = extra.get(config.SECTION, {})
    if section is None or _has_inner(extra) or not isinstance(own, Mapping):
        return child
    inner = config.Inner(
        name=child.get("kv_connector") or "?",
        module_path=child.get("kv_connector_module_path"),
        extra_config=dict(extra),
    )
    ours = {**section, **own, "inner": msgspec.to_builtins(inner)}
    return {**child, "kv_connector_extra_config": {**extra, config.SECTION: ours}}


def shown_to_inner(vllm_config: Any) -> Any:
    """The configuration as the real connector would see it without us."""
    transfer = vllm_config.kv_transfer_config
    extra = transfer.kv_connector_extra_config
    if not _has_inner(extra):
        return vllm_config
    theirs = copy.copy(transfer)
    theirs.kv_connector_extra_config = {k: v for k, v in extra.items() if k != config.SECTION}
    shown = copy.copy(vllm_config)
    shown.kv_transfer_config = theirs
    return shown


def _wanted(kv_transfer_config: Any) -> bool:
    if os.environ.get(WRAP_ENV) == "1":
        return True
    extra = kv_transfer_config.kv_connector_extra_config or {}
    if _has_inner(extra):
        return True
    children = extra.get(_CHILDREN)
    return (
        kv_transfer_config.kv_connector == _MULTI
        and isinstance(children, list)
        and any(map(_asks, children))
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
    return any(base.__name__ == _MULTI for base in real.__mro__)


def _meet_children(kv_transfer_config: Any) -> None:
    """Know the children's classes by name before their first stats come."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for child in kv_transfer_config.kv_connector_extra_config.get(_CHILDREN) or ():
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
    return subclass(real) if os.environ.get(WRAP_ENV) == "1" else real
