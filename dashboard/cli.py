"""The ``kvlens`` command. Subcommands import what they need when they run."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvlens.dashboard.sizing import arguments as sizing
from kvlens.dashboard.sizing import traffic
from kvlens.telemetry import __version__
from kvlens.telemetry.semconv import Cause, Verdict

DEFAULT_PORT = 8790
OK, USAGE = 0, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit code (0 fine, 1 a critical finding, 2 bad usage)."""
    options = _parser().parse_args(argv)
    if argv is None and options.run is _simulate:
        _same_order()
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] == "kvlens":
            raise
        print(
            f"kvlens: this command needs {error.name}, which is not installed here: "
            f"pip install 'kvlens[dashboard]'",
            file=sys.stderr,
        )
        return USAGE
    return code


def _same_order() -> None:
    """Begin again with fixed hashes: vLLM goes through sets of keys, so runs would differ."""
    if "PYTHONHASHSEED" not in os.environ:
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvlens",
        description="See where KV-offload hits die in vLLM, and stop them from dying.",
    )
    parser.add_argument("--version", action="version", version=f"kvlens {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serve = commands.add_parser(
        "serve", help="run the dashboard", description="Receive, store and show telemetry."
    )
    serve.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=_port, help=f"default {DEFAULT_PORT}; 0 picks a free one")
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
    serve.set_defaults(run=_serve)

    demo = commands.add_parser(
        "demo",
        help="show the zero-hit defect and its correction on a real vLLM",
        description="Serve the same traffic with a real vLLM twice, lookup as it is in that "
        "release, then corrected, with the dashboard beside it. Exit code 0 only if the defect "
        "was seen, explained and corrected.",
    )
    demo.add_argument("--json", metavar="FILE", type=Path, help="write the numbers to FILE")
    demo.add_argument("--no-serve", action="store_true", help="end the dashboard at the end")
    demo.add_argument("--port", type=_port, default=DEFAULT_PORT, help="of the dashboard")
    demo.add_argument(
        "--engine-python",
        metavar="PYTHON",
        help="interpreter with vLLM 0.29.0 and kvlens (default: $KVLENS_DEMO_ENGINE_PYTHON, "
        "else .venv-affected/bin/python)",
    )
    demo.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="what that vLLM runs on (default: %(default)s; docs/gpu.md)",
    )
    demo.set_defaults(run=_demo)

    simulate = commands.add_parser(
        "simulate",
        help="run scenario files on the installed vLLM's own scheduler, without a model",
        description="Drive the installed vLLM's scheduler, KV-cache manager and the connector by "
        "scenario files (docs/scenarios.md) and print what became of each request. Exit code 1 "
        "if a critical incident was found, 2 if a scenario cannot be used.",
    )
    simulate.add_argument("scenarios", metavar="SCENARIO", nargs="*", type=Path, help="YAML file")
    simulate.add_argument(
        "--lookup",
        choices=("corrected", "exact", "stock"),
        help="how the offload lookup is done (default: corrected; with --trace all three)",
    )
    simulate.add_argument("--json", metavar="FILE", type=Path, help="write all records to FILE")
    traffic.add(simulate)
    simulate.set_defaults(run=_simulate)

    inspect = commands.add_parser(
        "inspect",
        help="show what a flight recorder kept",
        description="Show the requests in flight-recorder files (docs/flight-recorder.md), one of "
        "them in full with --request. Exit code 2 if a file is not one.",
    )
    inspect.add_argument("files", metavar="FILE", nargs="+", type=Path, help="file or folder")
    inspect.add_argument("--request", metavar="ID", help="this request in full")
    inspect.add_argument(
        "--verdict", choices=[str(one) for one in Verdict], action="append", default=[]
    )
    inspect.add_argument(
        "--cause", choices=[str(one) for one in Cause], action="append", default=[]
    )
    inspect.add_argument(
        "--since", metavar="TIME", type=_time, help="Unix seconds, or 2026-09-07T12:00:00 (UTC)"
    )
    inspect.add_argument("--until", metavar="TIME", type=_time, help="both by time of finish")
    inspect.add_argument("--json", action="store_true", help="print records as JSON lines")
    inspect.set_defaults(run=_inspect)

    replay = commands.add_parser(
        "replay",
        help="do a recording's lookups again: what would have been served, and which incidents",
        description="Go through flight-recorder files (docs/flight-recorder.md): what each search "
        "would have served of what was resident, and the incidents that a dashboard would have "
        "opened. Exit code 1 if one is critical or a request was served an unsafe boundary, 2 if "
        "a file is not one.",
    )
    replay.add_argument("files", metavar="FILE", nargs="+", type=Path, help="file or folder")
    replay.add_argument(
        "--lookup",
        choices=("corrected", "exact", "stock"),
        default="exact",
        help="the search to compare with what was served (default: %(default)s)",
    )
    replay.add_argument("--json", metavar="FILE", type=Path, help="write all numbers to FILE")
    replay.set_defaults(run=_replay)

    doctor = commands.add_parser(
        "doctor",
        help="say what is wrong with a vLLM server's KV offloading, from its /metrics",
        description="Examine any vLLM server, with or without kvlens, from its /metrics page now "
        "and a little later, or from two saved pages. Exit code 1 if a finding is critical, 2 if "
        "a page cannot be read.",
    )
    doctor.add_argument(
        "sources",
        metavar="URL | BEFORE AFTER",
        nargs="+",
        help="address of the server, or two saved pages, the earlier one first",
    )
    doctor.add_argument(
        "--wait", metavar="SECONDS", type=_seconds, default=10.0, help="between two looks (10)"
    )
    doctor.add_argument("--json", metavar="FILE", type=Path, help="write the report to FILE")
    doctor.add_argument(
        "--bundle", metavar="FILE", type=Path, help="write one redacted file for a bug report"
    )
    doctor.set_defaults(run=_doctor)
    _add_canary(commands)
    sizing.add(commands)
    rules = commands.add_parser(
        "rules",
        help="write the Prometheus rules and Grafana boards to a folder",
        description="Write kvlens' recording rules, alerts and Grafana boards to FOLDER, over "
        "older ones of the same names.",
    )
    rules.add_argument("folder", metavar="FOLDER", type=Path, help="made if it is not there")
    rules.add_argument(
        "--dashboard",
        metavar="URL",
        help="address of `kvlens serve`: alerts lead to the runbooks there, boards to its requests",
    )
    rules.set_defaults(run=_rules)
    return parser


def _add_canary(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    canary = commands.add_parser(
        "canary",
        help="check on a running vLLM server that reloaded KV gives the same answers",
        description="Have random conversations with a vLLM server, push them out of its GPU "
        "cache, ask again, and compare with what it computes anew, token for token "
        "(docs/canary.md). Exit code 0 if nothing differs, 1 on a mismatch, 2 if it cannot run, "
        "3 if nothing was reloaded, so that nothing is shown.",
    )
    canary.add_argument("url", metavar="URL", help="address of the server: http://host:port")
    for name, default, meaning in (
        ("conversations", 20, "how many"),
        ("seed", 0, "the same seed gives the same conversations"),
        ("turns", 4, "of a conversation, at most"),
        ("output-tokens", 16, "of each answer"),
        ("vocab", 500, "prompts are made of token ids below it"),
    ):
        canary.add_argument(
            f"--{name}",
            metavar="N",
            type=_count if name != "seed" else _natural,
            default=default,
            help=f"{meaning} (default: {default})",
        )
    canary.add_argument(
        "--prompt-tokens",
        metavar="N",
        type=_count,
        help="of the longest prompts (default: what the model takes, at most 4096)",
    )
    canary.add_argument("--json", metavar="FILE", type=Path, help="write the report to FILE")
    canary.set_defaults(run=_canary)


def _natural(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    return int(text)


def _count(text: str) -> int:
    number = _natural(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than 1")
    return number


def _port(text: str) -> int:
    port = int(text) if text.isdecimal() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return port


def _serve(options: argparse.Namespace) -> int:
    from kvlens.dashboard import serve
    from kvlens.dashboard.settings import Settings, SettingsError, load_settings
    from kvlens.dashboard.store.base import StoreError
    from kvlens.telemetry import environment

    for sentence in environment.misspelt(os.environ, Settings.model_fields):
        print(f"kvlens serve: {sentence}", file=sys.stderr)
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
            serve.run(settings)
    except (SettingsError, serve.ServeError, StoreError) as error:
        print(f"kvlens serve: {error}", file=sys.stderr)
        return USAGE
    return OK


def _demo(options: argparse.Namespace) -> int:
    from kvlens.dashboard.demo.run import DemoOptions, run

    return run(
        DemoOptions(
            port=options.port,
            serve=not options.no_serve,
            json_path=options.json,
            engine_python=options.engine_python,
            device=options.device,
        )
    )


def _simulate(options: argparse.Namespace) -> int:
    if options.trace is not None:
        return traffic.run(options)
    if not options.scenarios:
        print("kvlens simulate: give scenario files or --trace FILE", file=sys.stderr)
        return USAGE
    from kvlens.connector.simulation import command
    from kvlens.dashboard.detect.engine import default_detectors
    from kvlens.dashboard.detect.offline import detect
    from kvlens.dashboard.settings import SettingsError, load_settings

    try:
        settings = load_settings()
    except SettingsError as error:
        print(f"kvlens simulate: {error}", file=sys.stderr)
        return USAGE
    return command.run(
        options.scenarios,
        options.lookup or "corrected",
        options.json,
        lambda engine, finished, waiting: detect(
            engine, finished, waiting, default_detectors(settings)
        ),
    )


def _time(text: str) -> float:
    from kvlens.dashboard.flight.inspect import parse_time

    try:
        return parse_time(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time: give Unix seconds or 2026-09-07T12:00:00"
        ) from error


def _inspect(options: argparse.Namespace) -> int:
    from kvlens.dashboard.flight import inspect

    filters = inspect.Filters(
        request=options.request,
        verdicts=options.verdict,
        causes=options.cause,
        since=options.since,
        until=options.until,
    )
    return inspect.run(options.files, filters, options.json)


def _replay(options: argparse.Namespace) -> int:
    try:
        from kvlens.dashboard.flight import report
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == "kvlens":
            raise
        print(
            f"kvlens replay: its detectors need {error.name}: pip install 'kvlens[dashboard]' "
            "(kvlens inspect does without)",
            file=sys.stderr,
        )
        return USAGE
    return report.run(options.files, options.lookup, options.json)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds (0 to 86400)")
    return seconds


def _doctor(options: argparse.Namespace) -> int:
    from kvlens.dashboard.doctor import command

    return command.run(options.sources, options.wait, options.json, options.bundle)


def _canary(options: argparse.Namespace) -> int:
    from kvlens.dashboard.canary import command

    return command.run(
        command.CanaryOptions(
            url=options.url,
            conversations=options.conversations,
            seed=options.seed,
            turns=options.turns,
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
            vocab=options.vocab,
            json_path=options.json,
        )
    )


def _rules(options: argparse.Namespace) -> int:
    from kvlens.dashboard.shipped import command

    return command.run(options.folder, options.dashboard)


if __name__ == "__main__":
    sys.exit(main())
