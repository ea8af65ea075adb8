"""Run two engines in one process, one after the other; prints what the registry says of each.

python restart.py ARGUMENTS-OF-THE-SERVER...
"""

from __future__ import annotations

import gc
import json

TOKENS = 600


def main() -> None:
    from prometheus_client import REGISTRY
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # Arguments of the HTTP side (host, port) mean nothing here.
    arguments, _ = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_known_args()
    options = vars(EngineArgs.from_cli_args(arguments)) | {"disable_log_stats": False}
    seen = []
    for seed in (1, 2):
        llm = LLM(**options)
        prompt = {"prompt_token_ids": [3 + (seed * token) % 500 for token in range(TOKENS)]}
        at_start = REGISTRY.get_sample_value(*sample("kvlens_requests_total", verdict="cold"))
        # Numbers leave the engine with its steps: more requests bring those of the first.
        for _ in range(20):
            llm.generate(prompt, SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
            if REGISTRY.get_sample_value(*sample("kvlens_requests_total", verdict="cold")):
                break
        names = {getattr(collector, "_name", "") for collector in REGISTRY._collector_to_names}
        seen.append(
            {
                "at_start": at_start,
                "cold": REGISTRY.get_sample_value(*sample("kvlens_requests_total", verdict="cold")),
                "ours": sum(name.startswith("kvlens_") for name in names),
            }
        )
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
    print(json.dumps(seen))


def sample(name: str, **labels: str) -> tuple[str, dict[str, str]]:
    return name, {"model_name": "random-hybrid", "engine": "0", **labels}


if __name__ == "__main__":
    main()
