"""Lines of the public trace formats, checked field by field.

=============  ===========================================================================
mooncake       ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``: 512 tokens a
               block, equal ids mean equal prefixes (Qin et al., FAST '25)
qwen-bailian   ``chat_id``, ``parent_chat_id``, ``timestamp`` (s), ``type``, ``turn`` besides: 16
               tokens a block, equal ids mean equal blocks whatever is before them (Wang et al.,
               ATC '25), so that they have to be chained
=============  ===========================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec

from kvlens.telemetry.sizing.trace import MAX_ID, MAX_TOKENS, TraceRequest

Id = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Prompt = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e15)]

_ALLOWED: Final = {
    "timestamp": "a number from 0",
    "input_length": f"a whole number of tokens, 1 to {MAX_TOKENS:,}",
    "output_length": f"a whole number of tokens, 0 to {MAX_TOKENS:,}",
    "hash_ids": f"a list of whole numbers, each 0 to {MAX_ID:,}",
    "chat_id": f"a whole number, 0 to {MAX_ID:,}",
    "parent_chat_id": "-1 for the first turn, else the chat_id of an earlier line",
    "type": "text",
    "turn": "a whole number from 0",
}
_FIELD: Final = re.compile(r"`\$\.(\w+)|field `(\w+)`")


class FieldError(ValueError):
    """What is wrong with one line: ``field: what; allowed: …``."""


class Mooncake(msgspec.Struct):
    """One line of Mooncake's format."""

    timestamp: Time
    input_length: Prompt
    output_length: Tokens
    hash_ids: list[Id]


class Qwen(msgspec.Struct):
    """One line of Qwen-Bailian's format."""

    chat_id: Id
    parent_chat_id: Annotated[int, msgspec.Meta(ge=-1, le=MAX_ID)]
    timestamp: Time
    input_length: Prompt
    output_length: Tokens
    type: str
    turn: Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
    hash_ids: list[Id]


class LineFormat:
    """One line format; ``read`` gives a request or raises :class:`FieldError`."""

    def __init__(self, name: str, block_tokens: int, line: type[Any]) -> None:
        self.name = name
        self.block_tokens = block_tokens
        self.fields: tuple[str, ...] = line.__struct_fields__
        self._decode: Callable[[bytes], Any] = msgspec.json.Decoder(line).decode
        self.request: Callable[[Any], TraceRequest] = plain

    def read(self, line: bytes) -> TraceRequest:
        """Check a line and take it as a request."""
        try:
            return self.request(self._decode(line))
        except msgspec.ValidationError as error:
            raise FieldError(_explained(str(error))) from None
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise FieldError(f"not valid JSON: {error}") from None


def plain(line: Mooncake) -> TraceRequest:
    """A line whose ids are chained already; milliseconds become seconds."""
    return TraceRequest(line.timestamp / 1000, line.input_length, line.output_length, line.hash_ids)


class Chained:
    """Lines whose ids are not chained: equal numbers come out for equal prefixes only."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        self._sessions: dict[int, int] = {}

    def __call__(self, line: Qwen) -> TraceRequest:
        """Number the prefixes that end at each block, and follow the conversation."""
        numbers, before, ids = self._numbers, -1, []
        for one in line.hash_ids:
            before = numbers.setdefault((before, one), len(numbers))
            ids.append(before)
        session = self._sessions.get(line.parent_chat_id, line.chat_id)
        self._sessions[line.chat_id] = session
        return TraceRequest(line.timestamp, line.input_length, line.output_length, ids, session)


def mooncake() -> LineFormat:
    """Mooncake's format."""
    return LineFormat("mooncake", 512, Mooncake)


def qwen() -> LineFormat:
    """Qwen-Bailian's format; one object reads one trace."""
    made = LineFormat("qwen-bailian", 16, Qwen)
    made.request = Chained()
    return made


def _explained(said: str) -> str:
    match = _FIELD.search(said)
    field = (match[1] or match[2]) if match else ""
    what = said.partition(" - at")[0]
    what = (what[0].lower() + what[1:]).replace("`", "")
    if field not in _ALLOWED:
        return what
    return f"{field}: {what}; allowed: {_ALLOWED[field]}"
