"""Numbers that have to add up, checked as they are made.

=====================  =====================================================
request_tokens         local + served + computed = prompt; after a full hit the
                       last token is computed again all the same; what another
                       connector served counts as served
hits_within_queries    chunks found <= chunks asked for, per group query
boundary_within_hits   boundary answered <= what the chunks found reach, per group
stored_chunks          stored = resident + evicted + reset, per group
=====================  =====================================================

A violation is a defect of kvlens, or vLLM working in a way that kvlens does
not know: numbers of this engine are not to be trusted then. It is counted and,
once per identity, logged with the numbers. Each side of an identity comes from
another source: what vLLM's search answered against what its queries found,
where the model runner starts against what the tier was said to serve, sums of
chunks in facts against the replayed set of resident ones.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

from kvlens.telemetry import semconv
from kvlens.telemetry.records import Layout, Lookup
from kvlens.telemetry.semconv import Exit, Identity
from kvlens.telemetry.sinks import MetricSink
from kvlens.telemetry.state.residency import Residency

logger = logging.getLogger(__name__)


class Identities:
    """Checks one engine's numbers; belongs to the drain thread."""

    def __init__(self, layout: Layout, metrics: MetricSink) -> None:
        self._metrics = metrics
        self._groups = [group.kv_group for group in layout.groups]
        self._resident: Counter[int] = Counter()
        """Stored - evicted since the last reset, by group."""
        self._known = True
        self._logged: set[Identity] = set()

    def lookup(self, lookup: Lookup) -> None:
        """Check an answered lookup."""
        reach: dict[int, int] = {}
        for group in lookup.groups:
            hits = group.raw_hits
            if not group.pass_number or hits is None:
                continue
            if not 0 <= hits <= group.width:
                self._violated(
                    Identity.HITS_WITHIN_QUERIES,
                    f"group {group.kv_group}: {hits} chunks found of {group.width} asked for",
                )
            end = (group.start_chunk + hits) * group.tokens_per_chunk
            reach[group.kv_group] = max(reach.get(group.kv_group, 0), end)
        if not lookup.result or lookup.exit == Exit.PARTIAL_TAIL:
            return
        boundary = lookup.local_tokens + lookup.result
        for kv_group, end in reach.items():
            if boundary > end:
                self._violated(
                    Identity.BOUNDARY_WITHIN_HITS,
                    f"boundary {boundary}, but chunks found of group {kv_group} reach {end}",
                )

    def request(self, prompt: int, local: int, served: int, computed: int) -> None:
        """Check the tokens of a request that ran."""
        rest = prompt - local - served
        if computed != max(rest, 1):
            self._violated(
                Identity.REQUEST_TOKENS,
                f"{local} local + {served} served + {computed} computed of {prompt} prompt tokens",
            )

    def stored(self, counts: Mapping[int, int]) -> None:
        """Chunks whose store completed, by group."""
        self._resident.update(counts)

    def evicted(self, counts: Mapping[int, int]) -> None:
        """Chunks that were evicted, by group."""
        self._resident.subtract(counts)

    def found(self, kv_group: int, count: int, residency: Residency) -> None:
        """A lookup found chunks that were not known to be resident."""
        self._resident[kv_group] += count
        if count and self._known and not residency.unknown:
            self._violated(
                Identity.STORED_CHUNKS,
                f"group {kv_group}: {count} chunks were found that were never seen stored",
            )

    def reset(self) -> None:
        """The tier was emptied."""
        self._resident.clear()
        self._known = True

    def check(self, residency: Residency) -> None:
        """Compare with what is resident; call when all facts so far were replayed."""
        if residency.unknown:
            self._known = False
            return
        for kv_group in self._groups:
            resident = residency.resident_count(kv_group)
            if self._known and self._resident[kv_group] != resident:
                self._violated(
                    Identity.STORED_CHUNKS,
                    f"group {kv_group}: stored - evicted is {self._resident[kv_group]}, "
                    f"resident are {resident}",
                )
            self._resident[kv_group] = resident
        self._known = True

    def _violated(self, identity: Identity, numbers: str) -> None:
        self._metrics.count(semconv.IDENTITY_VIOLATIONS, 1, (str(identity),))
        if identity not in self._logged:
            self._logged.add(identity)
            logger.warning(
                "kvlens: numbers do not add up (%s): %s; serving is not affected, more are only "
                "counted in %s",
                identity,
                numbers,
                semconv.IDENTITY_VIOLATIONS.exposed_name,
            )
