"""Environment variables that look like settings of kvlens and are none."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Final

PREFIX: Final = "KVLENS_"
_ALIKE: Final = 0.85
"""Lower, and a variable of the dashboard would pass for a mistyped one of the connector."""
_SERVICE_LINK: Final = re.compile(r"\A(tcp|udp|sctp)://\S+\Z")


def misspelt(environ: Mapping[str, str], settings: Collection[str]) -> list[str]:
    """One sentence for each variable that is no setting, yet nearly one of ``settings``.

    Others are not spoken of: one environment may serve connector, dashboard and demo.
    """
    known = {PREFIX + name.upper() for name in settings}
    found = []
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in known:
            continue
        if is_service_link(environ[variable]):
            continue
        meant = difflib.get_close_matches(variable, known, n=1, cutoff=_ALIKE)
        if meant:
            found.append(f"{variable} is no setting and is ignored: did you mean {meant[0]}?")
    return found


def is_service_link(value: str) -> bool:
    """Whether Kubernetes may have set this: it tells pods of each Service named ``kvlens`` by
    ``KVLENS_PORT=tcp://10.0.0.7:8790`` and the like.

    https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
    """
    return bool(_SERVICE_LINK.match(value))
