"""Python imports this at its start: vLLM's private modules change as the environment says."""

import json
import os
import sys
from pathlib import Path

if text := os.environ.get("KVLENS_TEST_MUTANT"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "connector"))
    from mutants import install

    install([(what, name) for what, name in json.loads(text)])
