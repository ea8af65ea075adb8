"""The real connector behind ``KVLensConnector``, as the configuration names it."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from kvlens.connector import config

NAME = "KVLensConnector"
WRAP_ENV = "KVLENS_WRAP"
"""``1``: whatever connector is configured is watched."""
MULTI = "MultiConnector"
CHILDREN = "connectors"
"""Of ``MultiConnector``: its children's configurations."""


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
    children = extra.get(CHILDREN)
    if kv_transfer_config.kv_connector == MULTI and isinstance(children, list):
        resolved = _resolved_children(children, extra)
        if resolved != children:
            kv_transfer_config.kv_connector_extra_config = {**extra, CHILDREN: resolved}


def _resolved_children(children: list[Any], extra: Mapping[str, Any]) -> list[Any]:
    """Children of ``MultiConnector``: all are watched if it is, else those that ask for it."""
    section = extra[config.SECTION] if has_inner(extra) else None
    resolved = [_resolved_child(child, section) for child in children]
    if os.environ.get(WRAP_ENV) == "1":
        return resolved  # all have our class anyway
    watched = {child["kv_connector"] for child in resolved if asks(child)}
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


def has_inner(extra: Mapping[str, Any] | None) -> bool:
    """Whether an extra config names a connector to watch."""
    section = (extra or {}).get(config.SECTION)
    return isinstance(section, Mapping) and section.get("inner") is not None


def asks(child: Any) -> bool:
    """Whether a child of ``MultiConnector`` asks to be watched."""
    return isinstance(child, Mapping) and has_inner(child.get("kv_connector_extra_config"))


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
    if section is None or has_inner(extra) or not isinstance(own, Mapping):
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
    if not has_inner(extra):
        return vllm_config
    theirs = copy.copy(transfer)
    theirs.kv_connector_extra_config = {k: v for k, v in extra.items() if k != config.SECTION}
    shown = copy.copy(vllm_config)
    shown.kv_transfer_config = theirs
    return shown
