"""The canary: ask, push out of the GPU cache, ask again, and compare with recomputing."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvlens.dashboard.canary.client import CanaryError, ServerClient
from kvlens.dashboard.canary.plan import Conversation, Plan
from kvlens.dashboard.canary.report import Asked, CanaryReport, Mismatch

BATCH: Final = 25
"""Conversations that take turns: each push out of the GPU cache serves them all."""
RESETS: Final = 20
"""A reset fails while blocks are still being stored; each try lets the engine go on."""


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Position of the first token that differs, the shorter one's end included; None if none."""
    for position, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


@dataclass(frozen=True)
class Answer:
    """What came back, and how much of its prompt was reloaded (None: not known)."""

    tokens: list[int]
    reloaded: int | None


def run(
    client: ServerClient, plan: Plan, progress: Callable[[str], None] = lambda _: None
) -> CanaryReport:
    """Play all conversations of a plan on a server; raises :class:`CanaryError`.

    The server must be connected (:meth:`Client.connect`).
    """
    report = CanaryReport(model=client.model, seed=plan.seed)
    report.has_counters = client.counters() is not None
    canary = _Canary(client, plan, report)
    conversations = plan.all()
    for start in range(0, len(conversations), BATCH):
        batch = conversations[start : start + BATCH]
        canary.play(batch)
        progress(
            f"{start + len(batch)} of {len(conversations)} conversations, "
            f"{report.reloaded_answers} of {report.answers} answers reloaded, "
            f"{len(report.mismatches)} differ"
        )
    return report


class _Canary:
    def __init__(self, client: ServerClient, plan: Plan, report: CanaryReport) -> None:
        self._client = client
        self._plan = plan
        self._report = report
        self._fillers = 0
        self._reloaded: set[int] = set()

    def play(self, batch: Sequence[Conversation]) -> None:
        """All turns of some conversations, in turn."""
        for turn in range(max(len(one.turn_tokens) for one in batch)):
            talking = [one for one in batch if turn < len(one.turn_tokens)]
            for one in talking:
                one.begin(turn)
            if turn:
                self._empty_gpu_cache()
            going_on = [self._ask(one.prompts[-1]) for one in talking]
            self._empty_gpu_cache()
            again = [self._ask(one.prompts[-1]) for one in talking]
            for one, *answers in zip(talking, going_on, again, strict=True):
                recomputed = self._recompute(one.prompts[-1])
                for asked, answer in zip(Asked, answers, strict=True):
                    self._compare(one, asked, answer, recomputed)
                one.answered(recomputed)
            self._report.turns += len(talking)
        self._report.conversations += len(batch)
        self._report.reloaded_conversations = len(self._reloaded)

    def _ask(self, prompt: list[int], salt: str | None = None) -> Answer:
        """Ask, and read from the server's counters what was reloaded for it."""
        before = self._client.counters() if self._report.has_counters else None
        tokens = self._client.ask(prompt, self._plan.output_tokens, salt)
        after = None if before is None else self._client.counters_after(before)
        if before is None or after is None:
            return Answer(tokens, None)
        # A prompt asks for at most all its tokens: more were asked for by someone else.
        mine = 0 < after.queries - before.queries <= len(prompt)
        return Answer(tokens, after.hits - before.hits if mine else None)

    def _recompute(self, prompt: list[int]) -> list[int]:
        return self._client.ask(prompt, self._plan.output_tokens, secrets.token_hex(16))

    def _compare(
        self, conversation: Conversation, asked: Asked, answer: Answer, recomputed: list[int]
    ) -> None:
        report = self._report
        report.answers += 1
        position = first_difference(answer.tokens, recomputed)
        others = [] if position is None else self._without_reloading(conversation)
        if position is not None and answer.tokens in others:
            report.rounded_answers += 1
            position = None
        if position is not None and any(
            other[: position + 1] != recomputed[: position + 1] for other in others
        ):
            report.unstable_answers += 1
            return
        if answer.reloaded is None:
            report.unattributed_answers += 1
        elif answer.reloaded:
            report.reloaded_answers += 1
            report.served_tokens += answer.reloaded
            self._reloaded.add(conversation.number)
        if position is not None:
            turn, length = len(conversation.prompts) - 1, len(conversation.prompts[-1])
            report.mismatches.append(
                Mismatch(conversation.number, turn, asked, position, length, answer.reloaded)
            )

    def _without_reloading(self, conversation: Conversation) -> list[list[int]]:
        """What else the server answers without its offload tier.

        A prompt computed in other pieces is rounded otherwise, and in low precision
        another token may win by that alone. So the prompt is computed anew, and the
        conversation is had anew, turn by turn on top of the GPU cache, as it was when
        its KV was stored; its last prompt also once more.
        """
        salt = secrets.token_hex(16)
        others = [self._recompute(conversation.prompts[-1])]
        for prompt in conversation.prompts:
            answer = self._ask(prompt, salt)
            if answer.reloaded != 0:  # not known, or what is examined
                return others
        again = self._ask(conversation.prompts[-1], salt)
        return [*others, answer.tokens, *([again.tokens] if again.reloaded == 0 else [])]

    def _empty_gpu_cache(self) -> None:
        if self._report.evicted_by != "prompts" and self._reset():
            self._report.evicted_by = "reset"
            return
        self._report.evicted_by = "prompts"
        left = self._client.cache_tokens()
        if left is None:
            raise CanaryError(
                "the server does not tell the size of its GPU cache (vllm:cache_config_info), so "
                "it cannot be filled: start the server with VLLM_SERVER_DEV_MODE=1, which lets it "
                "be emptied"
            )
        longest = self._plan.prompt_tokens
        while left > 0:
            self._fillers += 1
            self._client.ask(self._plan.filler(self._fillers, min(longest, left) or 1), 1)
            left -= longest

    def _reset(self) -> bool:
        for _ in range(RESETS):
            done = self._client.reset()
            if done is None:
                return False
            if done:
                return True
            # Transfers are seen to have ended only in a step of the engine.
            self._fillers += 1
            self._client.ask(self._plan.filler(self._fillers, 1), 1)
        return False
