"""``--bundle``: one file for a bug report, without anything that names people or places.

Kept are numbers, and labels whose values come from closed sets. Every other
label value (models, hosts, adapters, paths) becomes a short hash, the same
wherever it occurs, so that series can still be told apart. The hash is salted
per bundle: it cannot be looked up in a table of known names.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from typing import Any, Final

from kvlens.dashboard.doctor.report import Report
from kvlens.dashboard.scrape import names
from kvlens.dashboard.scrape.page import Page, parse
from kvlens.telemetry import semconv

_FAMILIES: Final = (
    "vllm_", "kvlens_", "process_", "python_info", "lmcache_", "sglang_", "kvbm_",
)  # fmt: skip
_PLAIN: Final = frozenset(
    {
        names.LABEL_LE, names.LABEL_TRANSFER, semconv.LABEL_GROUP,
        semconv.LABEL_KIND, semconv.LABEL_EXIT, semconv.LABEL_VERDICT, semconv.LABEL_CAUSE,
        semconv.LABEL_DIRECTION, semconv.LABEL_REASON, semconv.LABEL_SOURCE, semconv.LABEL_TIER,
        *semconv.INFO.labels, "quantile", "finished_reason", "position", "block_size",
        "num_gpu_blocks", "kv_cache_size_tokens", "prefix_caching_hash_algo", "cache_dtype",
        "enable_prefix_caching", "mamba_block_size", "mamba_cache_mode", "sliding_window",
        "num_gpu_blocks_override", "gpu_memory_utilization", "source", "outcome", "operation",
        "cache_source", "pool",
    }
)  # fmt: skip
"""Labels whose values say nothing about who and where."""
_SAFE: Final = re.compile(r"[A-Za-z0-9_.,:/+=<>\-]{0,2000}\Z")
_HARMLESS: Final = re.compile(
    r"None|True|False|-?[0-9]{1,9}(?:\.[0-9]{1,9})?(?:e[+-]?[0-9]{1,3})?|"
)
"""Values that name nobody under any label: no address, and no number long enough to be a key."""


class Redactor:
    """Replaces names by hashes that are the same throughout one bundle."""

    def __init__(self, salt: bytes | None = None) -> None:
        self._salt = secrets.token_bytes(16) if salt is None else salt

    def name(self, value: str) -> str:
        """A name, hashed; empty stays empty."""
        if not value:
            return value
        digest = hashlib.blake2b(value.encode(), key=self._salt, digest_size=4).hexdigest()
        return f"redacted-{digest}"

    def label(self, key: str, value: str) -> str:
        """A label's value, hashed unless its key is known to be harmless."""
        harmless = key in _PLAIN and _SAFE.match(value)
        return value if harmless or _HARMLESS.fullmatch(value) else self.name(value)

    def page(self, text: str) -> str:
        """A page with the series that matter here, redacted, in the text format."""
        return "".join(self._lines(parse(text)))

    def _lines(self, page: Page) -> Sequence[str]:
        lines = []
        for name, samples in sorted(page.items()):
            if not name.startswith(_FAMILIES) or name.endswith("_created"):
                continue
            for sample in samples:
                labels = ",".join(
                    f'{key}="{_escape(self.label(key, value))}"'
                    for key, value in sorted(sample.labels.items())
                )
                lines.append(f"{name}{{{labels}}} {sample.value!r}\n")
        return lines

    def report(self, report: Report) -> dict[str, Any]:
        """The report: names of models and engines, and labels that evidence quotes."""
        data = report.as_dict()
        for item in (*data["findings"], *data["engines"]):
            item["model"] = self.name(item["model"])
            item["engine"] = self.label(names.LABEL_ENGINE, item["engine"])
        for finding in data["findings"]:
            finding["evidence"] = {
                key: self.label(key, value) if key in _PLAIN and isinstance(value, str) else value
                for key, value in finding["evidence"].items()
            }
        return data


def bundle(report: Report, texts: Sequence[tuple[str, str]], salt: bytes | None = None) -> str:
    """The bundle's JSON text."""
    redactor = Redactor(salt)
    return json.dumps(
        {
            "about": "made by kvlens doctor --bundle: numbers of a vLLM server; names are hashed",
            "report": redactor.report(report),
            "pages": {name: redactor.page(text) for name, text in texts},
        },
        indent=1,
    )


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
