"""Links lead somewhere, and commands in the documents are commands."""

from __future__ import annotations

import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest

from kvlens.dashboard import cli

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    if name and (ROOT / name).is_file()
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.M | re.S)
SHELL = {"", "sh", "bash", "console"}
EXPLAINED = re.compile(r" #| {2,}")
"""What follows is said about the command."""
AT_COMMAND = re.compile(r"(?:^|[;|(] ?|\bdo |bin/)kvlens (\w.*)$")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def anchors(path: Path) -> set[str]:
    """Anchors of headings, as GitHub makes them."""
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    plain = (re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for link in LINK.findall(FENCED.sub("", path.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def commands(path: Path) -> list[str]:
    """Lines of shell blocks, continued lines joined, and ``code`` that begins with a command."""
    text = path.read_text(encoding="utf-8")
    lines = []
    for _, language, block in FENCED.findall(text):
        if language in SHELL:
            joined = re.sub(r"\\\n\s*", " ", block)
            lines += [EXPLAINED.split(line.strip())[0] for line in joined.splitlines()]
    lines += re.findall(r"`((?:kvlens|make) [^`\n]+)`", FENCED.sub("", text))
    return lines


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_kvlens_commands_have_their_options(path: Path) -> None:
    wrong = []
    for line in commands(path):
        for given in AT_COMMAND.findall(line):
            words = shlex.split(given.split(" | ")[0].split(";")[0].split(" > ")[0])
            if not known(words):
                wrong.append(line)
    assert wrong == []


def known(words: list[str]) -> bool:
    """Whether the subcommand exists and has every option that is given."""
    command = subcommands().get(words[0])
    if command is None:
        return False
    options = {option for action in command._actions for option in action.option_strings}
    given = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    return given <= options


@cache
def subcommands() -> dict[str, cli.argparse.ArgumentParser]:
    (action,) = (
        action
        for action in cli._parser()._actions
        if isinstance(action, cli.argparse._SubParsersAction)
    )
    return dict(action.choices)


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    asked = {
        word
        for line in commands(path)
        for word in re.findall(r"(?:^|[ ;])make ([a-z][\w-]*)", line)
    }
    assert asked <= targets


def test_every_document_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link).resolve() for link in LINK.findall(index.read_text())}
    pages = {path for path in DOCUMENTS if path.parent == index.parent and path != index}
    assert pages <= linked


def test_every_subcommand_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [
        name for name in subcommands() if not re.search(rf"(kvlens|make) {name}\b", readme)
    ] == []


def test_the_architecture_names_rooms_and_files_that_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:connector|telemetry|dashboard)/[\w/.]*)`", text))
    assert len(named) > 30
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    rooms = [path for path in (ROOT / "dashboard").iterdir() if (path / "__init__.py").exists()]
    told = {path.split("/")[1] for path in named if path.startswith("dashboard/")}
    short = set(re.findall(r"`(\w+)/`", text))
    assert {room.name for room in rooms} - told - short <= {"shipped"}
