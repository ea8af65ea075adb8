"""Runs the detectors over what became durable, in order, on the writer thread.

The store keeps the detectors' states with a checkpoint. What was committed
after it is read again at the next start, so a crash between a commit and its
detection loses nothing and reports nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvlens.dashboard.detect.base import Detector
from kvlens.dashboard.detect.panel import Observed, Panel
from kvlens.dashboard.detect.scraped import Scraped
from kvlens.dashboard.model.engine import SILENT, Engine
from kvlens.dashboard.model.incident import Incident
from kvlens.dashboard.model.scrape import Scrape
from kvlens.dashboard.store.base import Store
from kvlens.telemetry.records import EngineInfo, RequestRecord

_REPLAY: Final = 1000
"""Records read at once after a restart."""
_SAVE_EVERY: Final = 5000
"""Records without a changed incident after which states are saved anyway."""


class Detection:
    """Feeds detectors and keeps what they find."""

    def __init__(
        self,
        detectors: Sequence[Detector],
        store: Store,
        publish: Callable[[Incident], None],
        failed: Callable[[], None],
        scraped: Scraped | None = None,
    ) -> None:
        """``publish`` gets each change once it is kept; ``failed`` counts errors of ours."""
        self._panel = Panel(detectors, scraped, failed)
        self._store = store
        self._publish = publish
        self._checkpoint = 0
        self._unsaved = 0
        self._engines: dict[str, EngineInfo] = {}
        self._ended: dict[str, float] = {}
        self._silent: set[str] = set()

    def restore(self) -> None:
        """Go on where the last process stopped; call before the first :meth:`process`."""
        engines = self.load()
        while records := self._store.records_after(self._checkpoint, _REPLAY):
            self.process(records)
        self.process(
            (),
            [
                (engine.info.incarnation_id, engine.ended_at)
                for engine in engines
                if engine.ended_at is not None and engine.end_reason != SILENT
            ],
        )
        self.end_silent(engines)

    def end_silent(self, engines: Sequence[Engine]) -> None:
        """Make up for the end of engines that fell silent, should the last process have died."""
        self._fell_silent(
            [
                (engine.info.incarnation_id, engine.ended_at)
                for engine in engines
                if engine.ended_at is not None and engine.end_reason == SILENT
            ]
        )

    def listen(self, heard_before: float) -> list[str]:
        """End engines of which nothing was heard since then; returns their incarnations.

        Their incidents close. One that is heard of again begins without a history.
        """
        fallen = self._store.silence(heard_before)
        self._fell_silent(fallen)
        return [incarnation for incarnation, _ in fallen]

    def _fell_silent(self, fallen: Sequence[tuple[str, float]]) -> None:
        for incarnation, at in fallen:
            self._silent.add(incarnation)
            self._panel.end(incarnation, at)
        if self._panel.changed:
            self.save()

    def load(self) -> list[Engine]:
        """Take up what was kept, without what was stored since; returns all engines."""
        saved = self._store.load_detection()
        self._checkpoint = saved.checkpoint
        for kind, key, state in saved.states:
            self._panel.load(kind, key, state)
        engines = self._store.engines()
        self._engines = {engine.info.incarnation_id: engine.info for engine in engines}
        return engines

    @property
    def checkpoint(self) -> int:
        """Highest ``seq`` seen."""
        return self._checkpoint

    def process(
        self,
        records: Sequence[tuple[int, RequestRecord]],
        ended: Sequence[tuple[str, float]] = (),
        engines: Iterable[EngineInfo] = (),
        deferrals: Sequence[RequestRecord] = (),
        scrapes: Sequence[Scrape] = (),
    ) -> None:
        """Take what one commit made durable: ``(seq, record)`` and ended incarnations.

        ``deferrals`` (requests that still wait) and ``scrapes`` came with it; they
        are not kept, since both come again.
        """
        self._engines.update((info.incarnation_id, info) for info in engines)
        self._ended.update(ended)
        observed = [Observed(record) for _, record in records]
        observed += [Observed(record, waiting=True) for record in deferrals]
        self._panel.observe(observed, self._engines.get)
        late = {item.record.incarnation_id for item in observed}
        self._silent -= late
        for incarnation in self._ended.keys() & late.union(ident for ident, _ in ended):
            self._panel.end(incarnation, self._ended[incarnation])
        for scrape in scrapes:
            self._panel.scrape(scrape, self._tells)
        self._checkpoint = max([self._checkpoint, *(seq for seq, _ in records)])
        self._unsaved += len(observed) + len(scrapes)
        if self._panel.changed or self._unsaved >= _SAVE_EVERY:
            self.save()

    def _tells(self, model: str) -> bool:
        """Whether an engine of that model sends records and has not ended."""
        return any(
            info.model == model and incarnation not in self._ended.keys() | self._silent
            for incarnation, info in self._engines.items()
        )

    def flush(self) -> None:
        """Keep what :meth:`process` put off."""
        if self._unsaved or self._panel.changed:
            self.save()

    def save(self) -> None:
        """Keep incidents, states and the checkpoint, then publish the incidents."""
        states = [
            (str(part.kind), key, part.dump(key))
            for part in self._panel.parts()
            for key in sorted(part.dirty)
        ]
        changed = list(self._panel.changed.values())
        self._store.save_detection(self._checkpoint, changed, states)
        self._panel.changed.clear()
        for part in self._panel.parts():
            part.dirty.clear()
        self._unsaved = 0
        for incident in changed:
            self._publish(incident)
