"""vLLM without this package: one LLM, one call of `generate` with all requests.

Reads JSON lines: first the arguments of LLM, then lists of requests. Writes the seconds and tokens of each call.
"""

import json
import os
import sys
import time


def main() -> None:
    """Start the engine, then time a call per line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import vllm

    settings = json.loads(sys.stdin.readline())
    engine = vllm.LLM(skip_tokenizer_init=True, generation_config="vllm", seed=0, **settings)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        same = {key: job[key] for key in ("temperature", "top_p", "max_tokens")}
        params = [
            vllm.SamplingParams(**same, seed=seed, stop_token_ids=job["stop"], ignore_eos=True, detokenize=False)
            for seed in job["seeds"]
        ]
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        start = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main()
