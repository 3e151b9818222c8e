"""Sample the student with llama.cpp, from the GGUF file that it was unpacked from.

python scripts/real/sample.py choose STUDENT FOLDER: accuracy and tokens of greedy answers, by kind and number of events
of problems that are used for nothing else, and by system prompt on problems of the prompts.
python scripts/real/sample.py answers STUDENT PROBLEMS OUT: one graded response to every problem, as `rollout.from` and
expert.py read them. Resumes: problems that OUT has are left out.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

from steps import EVENTS, files
from transformers import AutoTokenizer

from lightning_weave.config import Grading
from lightning_weave.grading.graders import grade_answer

PARALLEL, CONTEXT, MAX_TOKENS, TEMPERATURE = 8, 768, 400, 0.6
DIFFICULTIES = (2, 3, 4, 5)
WORDINGS = (  # the first, no system prompt, is the student
    None,
    "Reason in at most three very short steps, only the calculations, then give the final answer.",
    "Solve the problem in as few words as possible: one short calculation per line, then the final answer.",
    "Be brief. Write each calculation on one line without explanation, then write the final answer.",
    "Write only the calculations, one per line, without words, then the final answer.",
)


class Answer(NamedTuple):
    """One response, with the prompt that it answers."""

    messages: list[dict[str, str]]
    prompt_ids: list[int]
    response_ids: list[int]
    finish: str
    text: str


class Student:
    """A server of llama.cpp in this process."""

    def __init__(self, folder: Path) -> None:
        import xllamacpp

        (file,) = folder.glob("*.gguf")
        params = xllamacpp.CommonParams()
        params.model.path, params.n_parallel, params.n_ctx = str(file), PARALLEL, PARALLEL * CONTEXT
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(os.environ.get("OMP_NUM_THREADS", "2"))
        params.verbosity = 0
        self.server = xllamacpp.Server(params)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def answer(self, question: str, system: str | None = None, temperature: float = 0.0, seed: int = 0) -> Answer:
        """Draw one response. The ids are those that were drawn, with the end of the turn."""
        turns = [{"role": "system", "content": system}] if system else []
        turns.append({"role": "user", "content": question})
        prompt = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        asked: dict[str, Any] = {"prompt": list(prompt), "n_predict": MAX_TOKENS, "return_tokens": True, "seed": seed}
        asked |= {"temperature": temperature, "samplers": ["temperature"] if temperature else ["top_k"], "top_k": 1}
        request = Request(
            f"{self.server.listening_address}/completion",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(request) as response:
            found = json.load(response)
        ended = found["stop_type"] == "eos"
        stop = self.tokenizer.eos_token_id
        ids = [*found["tokens"], *([stop] if ended and found["tokens"][-1:] != [stop] else [])]
        return Answer(turns, list(prompt), ids, "stop" if ended else "length", found["content"])


def is_right(text: str, row: dict[str, str]) -> bool:
    """Grade as the evaluation does: by the last number."""
    return grade_answer(Grading(kind="numeric"), text, row["answer"])[1]


def choose(student: Student, folder: Path) -> Iterator[str]:
    """Ask for everything that is chosen by the student alone."""

    def ask(rows: Sequence[dict[str, str]], system: str | None = None) -> str:
        with ThreadPoolExecutor(PARALLEL) as pool:
            found = list(pool.map(lambda row: student.answer(row["problem"], system), rows))
        right = sum(is_right(one.text, row) for one, row in zip(found, rows, strict=True))
        tokens = sum(len(one.response_ids) for one in found) / len(found)
        cut = sum(one.finish == "length" for one in found)
        return f"{right} of {len(rows)} right, {tokens:.0f} tokens, {cut} cut off"

    for events in DIFFICULTIES:
        rows = dict(files(dict.fromkeys(EVENTS, events)))["choice"]
        for kind in EVENTS:
            yield f"{kind}, {events} events: {ask([row for row in rows if row['kind'] == kind])}"
    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text("utf-8").splitlines()]
    for system in WORDINGS:
        yield f"{system}: {ask(prompts[:24], system)}"


def answers(student: Student, problems: Path, out: Path) -> None:
    """Answer every problem once, and append it to a file."""
    rows = [json.loads(line) for line in problems.read_text("utf-8").splitlines()]
    done = {json.loads(line)["id"] for line in out.read_text("utf-8").splitlines()} if out.exists() else set()
    waiting = [(seed, row) for seed, row in enumerate(rows) if row["id"] not in done]
    with ThreadPoolExecutor(PARALLEL) as pool, out.open("a", encoding="utf-8") as file:
        found = pool.map(lambda one: student.answer(one[1]["problem"], temperature=TEMPERATURE, seed=one[0]), waiting)
        for (_, row), one in zip(waiting, found, strict=True):
            more = {"correct": is_right(one.text, row), "answer": row["answer"], "problem": row["id"]}
            file.write(json.dumps({"id": row["id"], **one._asdict(), **more}) + "\n")
            file.flush()


if __name__ == "__main__":
    what, folder, *paths = sys.argv[1:]
    if what == "choose":
        for line in choose(Student(Path(folder)), Path(paths[0])):
            print(line, flush=True)
    else:
        answers(Student(Path(folder)), *map(Path, paths))
