"""``kvlens serve``: run the dashboard."""

from __future__ import annotations

import argparse
import contextlib
import os

from kvlens.dashboard.commands.arguments import DEFAULT_PORT, Commands, port
from kvlens.dashboard.commands.exits import OK, Refusal, complain


def add(commands: Commands) -> None:
    """Add the command and its arguments."""
    serve = commands.add_parser(
        "serve", help="run the dashboard", description="Receive, store and show telemetry."
    )
    serve.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=port, help=f"default {DEFAULT_PORT}; 0 picks a free one")
    serve.add_argument(
        "--store",
        metavar="STORE",
        help="SQLite file (default: user data folder) or clickhouse://user@host:8123/database",
    )
    serve.add_argument(
        "--scrape",
        metavar="URL",
        nargs="+",
        action="extend",
        help="vLLM servers, stock or with kvlens, whose /metrics are read",
    )
    serve.add_argument("--read-token", metavar="TOKEN", help="needed for pages and the API")
    serve.add_argument("--ingest-token", metavar="TOKEN", help="needed to send telemetry")
    serve.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from kvlens.dashboard import server
    from kvlens.dashboard.settings import Settings, SettingsError, load_settings
    from kvlens.dashboard.store.base import StoreError
    from kvlens.telemetry import environment

    for sentence in environment.misspelt(os.environ, Settings.model_fields):
        complain("serve", sentence)
    try:
        settings = load_settings(
            host=options.host,
            port=options.port,
            store=options.store,
            scrape=tuple(options.scrape) if options.scrape else None,
            read_token=options.read_token,
            ingest_token=options.ingest_token,
        )
        # uvicorn shuts down in order on Ctrl-C, then raises it anew.
        with contextlib.suppress(KeyboardInterrupt):
            server.run(settings)
    except (SettingsError, server.ServeError, StoreError) as error:
        raise Refusal(str(error)) from error
    return OK
