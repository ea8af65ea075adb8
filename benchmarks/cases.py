"""Named cases that are run one by one; their results are kept between runs and in a document."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

Results = dict[str, dict[str, Any]]


def arguments(names: Collection[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", help=f"of {', '.join(names)}")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--update", type=Path)
    return parser


def run_all(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    names: Collection[str],
    run: Callable[[str, Path], dict[str, Any]],
) -> tuple[list[str], Results]:
    """Run what is asked for; gives its names, and all results with those of earlier runs."""
    asked = options.only.split(",") if options.only else list(names)
    if unknown := set(asked) - set(names):
        parser.error(f"--only: no such case: {', '.join(sorted(unknown))}")
    kept = options.results is not None and options.results.exists()
    results: Results = json.loads(options.results.read_text()) if kept else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in asked:
            results[name] = run(name, Path(folder))
            if options.results is not None:
                options.results.write_text(json.dumps(results, indent=1))
    return asked, results


def update(path: Path, begin: str, end: str, text: str) -> None:
    """Put ``text`` between both marks of a document."""
    before, _, rest = path.read_text().partition(begin)
    path.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}")
