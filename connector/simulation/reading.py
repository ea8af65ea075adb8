"""Scenario files: YAML in, a checked :class:`Scenario` out, errors with file, line and field."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from kvlens.connector.simulation.scenario import STEPS, Layout, Repeat, Scenario

_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_NAMED = re.compile(r"`(\w+)`")
_UNKNOWN, _MISSING = "Object contains unknown field", "Object missing required field"


class ScenarioError(ValueError):
    """A scenario that cannot be used; the message says where, and what is allowed."""


def read(path: Path) -> Scenario:
    """Read a scenario file; raises :class:`ScenarioError`."""
    return parse(_text(path), str(path))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ScenarioError(f"{path}: cannot be read: {reason}") from error


def parse(text: str, name: str = "scenario") -> Scenario:
    """Read a scenario from YAML text; raises :class:`ScenarioError`."""
    return _Document(text, name).scenario()


def read_layout(path: Path) -> Layout:
    """The ``layout`` of a scenario file; raises :class:`ScenarioError`."""
    return _Document(_text(path), str(path)).layout()


def read_engine(path: Path) -> Scenario:
    """A scenario file's layout and engine; steps may be missing and are left out."""
    return _Document(_text(path), str(path)).engine()


class _Loader(yaml.SafeLoader):
    """Keeps YAML's types, except that dates and the like stay text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Document:
    """One file: its values, and the line of each."""

    def __init__(self, text: str, name: str) -> None:
        self._name = name
        self._lines: dict[str, int] = {}
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            self._values = None if node is None else self._value(loader, node, "$")
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            problem = getattr(error, "problem", None) or str(error)
            where = f"{name}:{mark.line + 1}" if mark else name
            raise ScenarioError(f"{where}: not valid YAML: {problem}") from error
        finally:
            loader.dispose()

    def scenario(self) -> Scenario:
        if not isinstance(self._values, dict):
            raise self._error("$", "a scenario is a mapping with the fields layout and steps")
        scenario: Scenario = self._convert(self._values, Scenario, "$")
        steps = self._steps(scenario.steps, "$.steps", len(scenario.layout.groups))
        return msgspec.structs.replace(scenario, steps=steps)

    def layout(self) -> Layout:
        if not isinstance(self._values, dict) or "layout" not in self._values:
            raise self._error("$", "missing field layout: the KV-cache groups of a model")
        layout: Layout = self._convert(self._values["layout"], Layout, "$.layout")
        return layout

    def engine(self) -> Scenario:
        self.layout()
        fields = dict(self._values or {}, steps=[])
        scenario: Scenario = self._convert(fields, Scenario, "$")
        return scenario

    def _steps(self, values: list[Any], path: str, groups: int) -> list[Any]:
        if not values:
            raise self._error(path, "at least one step is needed")
        steps = []
        for index, value in enumerate(values):
            where = f"{path}[{index}]"
            kinds = [kind for kind in STEPS if isinstance(value, dict) and kind in value]
            if len(kinds) != 1:
                found = f"this one has {' and '.join(kinds)}" if kinds else "this one has none"
                raise self._error(
                    where, f"a step has exactly one of the fields {', '.join(STEPS)}; {found}"
                )
            step = self._convert(value, STEPS[kinds[0]], where)
            for field in ("drop_chunks", "only_chunks"):
                for group in getattr(step, field, ()):
                    if not 0 <= group < groups:
                        raise self._error(
                            f"{where}.{field}",
                            f"there is no group {group}; groups are 0 to {groups - 1}",
                        )
            if isinstance(step, Repeat):
                inner = self._steps(step.steps, f"{where}.steps", groups)
                step = msgspec.structs.replace(step, steps=inner)
            steps.append(step)
        return steps

    def _convert(self, value: Any, type_: Any, path: str) -> Any:
        try:
            return msgspec.convert(value, type_)
        except msgspec.ValidationError as error:
            match = _PATH.match(str(error))
            what, below = (match["what"], match["path"] or "$") if match else (str(error), "$")
            raise self._explain(what, type_, path, below.removeprefix("$")) from None

    def _explain(self, what: str, type_: Any, path: str, below: str) -> ScenarioError:
        named = _NAMED.search(what)
        inner = _type_at(type_, below)
        if what.startswith((_UNKNOWN, _MISSING)) and named:
            fields = getattr(inner, "__struct_fields__", ())
            kind = "unknown field" if what.startswith(_UNKNOWN) else "missing field"
            message = f"{kind} {named[1]}; allowed: {', '.join(fields)}"
        elif (choices := _choices(inner)) and not what.startswith("Expected `object`"):
            message = f"{what[0].lower()}{what[1:]}; allowed: {', '.join(choices)}"
        else:
            message = f"{what[0].lower()}{what[1:]}".replace("`", "")
        at = path + below
        if named and f"{at}.{named[1]}" in self._lines:
            at = f"{at}.{named[1]}"
        return self._error(at, message.replace("`", ""))

    def _error(self, path: str, message: str) -> ScenarioError:
        known = path
        while known not in self._lines and known != "$":
            known = known[: max(known.rfind("."), known.rfind("["))]
        field = path.removeprefix("$").removeprefix(".")
        where = f"{self._name}:{self._lines.get(known, 1)}"
        return ScenarioError(f"{where}: {field}: {message}" if field else f"{where}: {message}")

    def _value(self, loader: _Loader, node: yaml.Node, path: str) -> Any:
        """Value of a node; notes its line, and refuses a key that is given twice."""
        self._lines[path] = node.start_mark.line + 1
        if isinstance(node, yaml.SequenceNode):
            return [self._value(loader, n, f"{path}[{i}]") for i, n in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return loader.construct_object(node, deep=True)
        values: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node, deep=True)
            below = f"{path}.{key}"
            if not isinstance(key, (str, int)) or key in values:
                self._lines[below] = key_node.start_mark.line + 1
                raise self._error(below, "given twice" if key in values else "not a field's name")
            values[key] = self._value(loader, value_node, below)
            self._lines[below] = key_node.start_mark.line + 1
        return values


def _type_at(type_: Any, below: str) -> Any:
    """Type of the field at ``.layout.groups[0].kind`` below ``type_``; None if it is lost."""
    for name in re.findall(r"\.(\w+)|\[(?:\d+|\.\.\.)\]", below):
        inner = _struct(type_)
        if name:
            type_ = get_type_hints(inner).get(name) if inner else None
        else:
            arguments = get_args(_plain(type_))
            type_ = arguments[-1] if arguments else None
    return _struct(type_) or type_


def _struct(type_: Any) -> Any:
    """The Struct in ``type_`` or ``type_ | None``; None if there is none."""
    options = get_args(type_) if get_origin(type_) in (Union, types.UnionType) else (type_,)
    return next((t for t in options if hasattr(t, "__struct_fields__")), None)


def _plain(type_: Any) -> Any:
    return get_args(type_)[0] if hasattr(type_, "__metadata__") else type_


def _choices(type_: Any) -> list[str]:
    if get_origin(type_) is Literal:
        return [str(choice).lower() for choice in get_args(type_)]
    return []
