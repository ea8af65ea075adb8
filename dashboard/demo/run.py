"""``kvlens demo``: the zero-hit defect happening, seen live, then corrected."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

from kvlens.dashboard.demo import engine, model, report
from kvlens.dashboard.demo.engine import EngineOptions
from kvlens.dashboard.demo.observe import Dashboard, require_free
from kvlens.dashboard.demo.process import DemoError, Interrupted, Supervisor
from kvlens.dashboard.demo.traffic import TimedAnswer, Traffic, TrafficClient

ARMS = {"stock": "stock", "kvlens": "corrected"}
"""Arms in order, and the lookup mode of each."""
MODEL_SIZE = "demo"
PLAN = Traffic(documents=4, rounds=3, prompt_tokens=3740, output_tokens=8, vocab=model.DEMO.vocab)
CHUNK_TOKENS = 896
"""Four chunks to a prompt. Of the model's five KV-cache groups four hold full-attention layers;
where each is taken for a drafter group each gives up a chunk: 4, 3, 2, 1, and nothing is left."""
GPU_BLOCKS = 230
"""Room for a prompt and a quarter, so that the next documents evict it."""
MAX_MODEL_LEN = 4608


@dataclass(frozen=True)
class DemoOptions:
    """Arguments of the command."""

    port: int
    serve: bool
    """Leave the dashboard up at the end."""
    json_path: Path | None = None
    engine_python: str | None = None
    device: str = engine.CPU
    """Where the engine runs, one of :data:`engine.DEVICES`."""


def run(options: DemoOptions) -> int:
    """Run the demo; 0 all of it was shown, 1 something was not. Raises :class:`DemoError`.

    128 + the signal's number when a signal ended it.
    """
    console = Console(stderr=True, highlight=False)
    code = None
    try:
        with (
            tempfile.TemporaryDirectory(prefix="kvlens-demo-") as folder,
            Supervisor() as supervisor,
        ):
            demo = Demo(options, supervisor, Path(folder), console)
            code = demo.play()
            if options.serve:
                demo.stay_up()
    except Interrupted as interrupt:
        # Ctrl-C is also how a dashboard that was left up is meant to be ended.
        console.print(f"ended by {interrupt}", markup=False)
        return interrupt.exit_code if code is None else code
    return code


class Demo:
    """One run: the dashboard, then the arms one after another."""

    def __init__(
        self, options: DemoOptions, supervisor: Supervisor, folder: Path, console: Console
    ) -> None:
        self._options = options
        self._supervisor = supervisor
        self._folder = folder
        self._console = console
        self._began = time.monotonic()

    def play(self) -> int:
        """Run both arms and print what they showed; 0 if everything did, else 1."""
        if self._options.port:
            require_free(self._options.port)
        self._require_writable()
        python = engine.find_python(self._options.engine_python)
        version = engine.engine_version(python)
        self._say(f"vLLM {version} of {python}")
        with self._console.status("generating the model"):
            engine.write_model(python, self._folder / "model", MODEL_SIZE)
        port = self._options.port or engine.free_port()
        with self._console.status("starting the dashboard"):
            self._dashboard = Dashboard.start(self._supervisor, port, self._folder)
        self._say(f"dashboard: {self._dashboard.url}")
        reference: dict[int, str] = {}
        arms = {name: self._arm(name, lookup, python, reference) for name, lookup in ARMS.items()}
        return self._conclude(version, arms["stock"], arms["kvlens"])

    def stay_up(self) -> None:
        """Keep the dashboard up until a signal comes; raises :class:`DemoError` if it ends."""
        self._say(f"the dashboard stays up: {self._dashboard.url} (Ctrl-C ends it)")
        self._dashboard.child.wait()
        self._dashboard.child.require_alive()

    def _arm(self, name: str, lookup: str, python: str, reference: dict[int, str]) -> report.Arm:
        engine_id = f"demo-{name}"
        options = EngineOptions(
            python=python,
            model=self._folder / "model",
            engine_id=engine_id,
            chunk_tokens=CHUNK_TOKENS,
            gpu_blocks=GPU_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            device=self._options.device,
            kvlens={"lookup": lookup, "otlp_endpoint": self._dashboard.url},
        )
        with self._console.status(f"arm {name}: starting vLLM (about half a minute)"):
            server = engine.start(self._supervisor, options, self._folder / f"{name}.log")
        self._say(f"arm {name}: vLLM is up, lookup {lookup}")
        client = TrafficClient(server.url, engine.MODEL_NAME)
        try:
            answers = self._send(client, name)
            counters = client.counters()
        except httpx.HTTPError as error:
            server.child.require_alive()
            raise DemoError(
                f"arm {name}: the server failed a request: {error}. Its last lines:\n"
                f"{server.child.log_tail()}"
            ) from error
        finally:
            client.close()
        requests = PLAN.requests + 1  # the warm-up
        records = self._dashboard.records(engine_id, requests)
        # Before the server stops: the end of an engine closes its incidents.
        incidents = self._dashboard.incidents(engine_id, at_least=int(name == "stock"))
        for incident in incidents:
            self._say(f"arm {name}: {incident['severity']} incident: {incident['summary']}")
        with self._console.status(f"arm {name}: stopping vLLM"):
            self._supervisor.stop(server.child)
        reference = reference or report.cold_texts(answers)
        return report.summarise(counters, records, incidents, answers, reference, requests)

    def _send(self, client: TrafficClient, name: str) -> list[TimedAnswer]:
        answers: list[TimedAnswer] = []
        with self._console.status(f"arm {name}: warming up") as status:
            for answer in client.play(PLAN, f"demo-{name}"):
                answers.append(answer)
                status.update(f"arm {name}: {len(answers)} of {PLAN.requests} requests answered")
                if answer.document == PLAN.documents - 1:
                    times = [one.first_token_seconds for one in answers[-PLAN.documents :]]
                    what = "evicted prompts again" if answer.round else "cold prompts"
                    shown = ", ".join(f"{seconds:.2f}" for seconds in times)
                    self._say(f"arm {name}: {what}, first token after {shown} s")
        return answers

    def _conclude(self, version: str, stock: report.Arm, kvlens: report.Arm) -> int:
        if self._options.json_path is not None:
            document = report.to_json(version, stock, kvlens)
            self._options.json_path.write_text(json.dumps(document, indent=2) + "\n")
        Console(highlight=False).print(report.table(version, stock, kvlens))
        failed = [check for check in report.checks(stock, kvlens) if not check.holds]
        for check in failed:
            self._console.print(
                f"not shown: {check.what} (found: {check.found})", style="red", markup=False
            )
        self._say("everything was shown" if not failed else f"{len(failed)} checks failed")
        return 1 if failed else 0

    def _require_writable(self) -> None:
        path = self._options.json_path
        if path is None:
            return
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise DemoError(f"--json {path}: not a file that can be written there")

    def _say(self, message: str) -> None:
        elapsed = time.monotonic() - self._began
        self._console.print(f"{elapsed:5.1f} s  {message}", markup=False, soft_wrap=True)
