"""Random conversations of several turns, the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

FIRST_TOKEN: Final = 3
"""Ids below it are often the unknown, begin and end tokens."""
_SHARED_EVERY: Final = 2
"""Every so many conversations begin with the words that the others of their kind begin with."""


@dataclass(frozen=True)
class Plan:
    """What is said. Sizes are tokens."""

    conversations: int
    seed: int
    turns: int
    """At most so many of each conversation."""
    prompt_tokens: int
    """Length of the last prompt of a conversation, at most; it includes all before it."""
    output_tokens: int
    """Of each answer."""
    vocab: int
    """Token ids are below it."""

    @property
    def least_prompt(self) -> int:
        """What a conversation of ``turns`` turns needs: an answer and two words for each."""
        return self.turns * (self.output_tokens + 2)

    def all(self) -> list[Conversation]:
        """Every conversation, before its first turn."""
        return [self._conversation(number) for number in range(self.conversations)]

    def filler(self, number: int, tokens: int) -> list[int]:
        """A prompt that nothing else resembles."""
        return self._words(random.Random(f"{self.seed} filler {number}"), tokens)

    def _conversation(self, number: int) -> Conversation:
        rng = random.Random(f"{self.seed} conversation {number}")
        turns = rng.randint(min(2, self.turns), self.turns)
        # Room for the answers between the prompts; the rest is said, in unequal parts.
        room = rng.randint(self.prompt_tokens // 2, self.prompt_tokens)
        room = max(room, self.least_prompt) - (turns - 1) * self.output_tokens
        cuts = sorted(rng.sample(range(1, room), turns - 1))
        parts = [end - start for start, end in zip([0, *cuts], [*cuts, room], strict=True)]
        new_tokens = [self._words(rng, part) for part in parts]
        if number % _SHARED_EVERY == 0:
            shared = self._words(random.Random(f"{self.seed} shared"), self.prompt_tokens // 4)
            new_tokens[0] = (shared + new_tokens[0])[: len(new_tokens[0])]
        return Conversation(number, new_tokens)

    def _words(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(FIRST_TOKEN, self.vocab) for _ in range(count)]


@dataclass
class Conversation:
    """One conversation as it goes on. Token ids never leave it but for the server."""

    number: int
    turn_tokens: list[list[int]]
    """What the user says in each turn."""
    prompts: list[list[int]] = field(default_factory=list, init=False)
    """What was asked in each turn so far: all that was said and answered before it."""
    _history: list[int] = field(default_factory=list, init=False)

    def begin(self, turn: int) -> None:
        """Make the prompt of the next turn."""
        self.prompts.append(self._history + self.turn_tokens[turn])

    def answered(self, answer: list[int]) -> None:
        """Take the answer into what the next prompt begins with."""
        self._history = self.prompts[-1] + answer
