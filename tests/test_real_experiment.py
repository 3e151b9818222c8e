"""What `make real` makes and counts, without a model: its problems, and the arithmetic of its page."""

import importlib.util
import io
import json
import re
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_weave.bench.definitions import load_benchmark
from lightning_weave.bench.samples import Sample
from lightning_weave.bench.statistics import ProblemMeans, resample
from lightning_weave.bench.summary import summarise, write_summary
from lightning_weave.config import Grading, load_recipe
from lightning_weave.grading.graders import grade_answer
from lightning_weave.maths.metrics import aes
from lightning_weave.stages.prompts import own_trajectories
from tiny import run_of, save_model

ROOT = Path(__file__).resolve().parent.parent
NUMERIC = Grading(kind="numeric")
COMPUTED = {
    "gain": lambda a, b: a + b,
    "sum": lambda a, b: a + b,
    "times": lambda a, b: a * b,
    "double": lambda a: 2 * a,
    "half": lambda a: a // 2,
    "larger": max,
}


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"real_{name}", ROOT / "scripts" / "real" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_problems_have_their_right_answer_and_are_in_one_file_only(tmp_path: Path) -> None:
    tasks = script("tasks")
    tasks.write(tmp_path)
    files = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.glob("*.jsonl")
    }
    assert {name: len(rows) for name, rows in files.items()} == {
        "same": 96,
        "other": 48,
        "prompts": 96,
        "expert": 192,
        "everyday": 24,
    }
    asked = [row["problem"] for rows in files.values() for row in rows]
    assert len(asked) == len(set(asked))
    for row in (row for name, rows in files.items() if name != "everyday" for row in rows):
        numbers = map(int, re.findall(r"\d+", row["problem"]))
        assert COMPUTED[row["kind"]](*numbers) == int(row["answer"]), row
        said = row["solution"] if row["kind"] != "larger" else row["solution"].split(" than")[0]
        assert grade_answer(NUMERIC, said, row["answer"])[1], row
        assert not grade_answer(NUMERIC, said, str(int(row["answer"]) + 1))[1]
    assert {row["kind"] for row in files["other"]}.isdisjoint(row["kind"] for row in files["same"])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    tasks.write(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


READ = {  # what a sentence of a story does, read from its words
    r"(?:has|trip of) (\d+)": lambda _, a: a,
    "one tulip": lambda _: 1,
    r"buys (\d+) boxes with (\d+)": lambda now, a, b: now + a * b,
    r"plants (\d+) (?:more )?rows of (\d+)": lambda now, a, b: now + a * b,
    r"works for (\d+) hours at (\d+)": lambda now, a, b: now + a * b,
    r"buys (\d+) \w+ for (\d+) dollars": lambda now, a, b: now - a * b,
    r"drives for (\d+) hours at (\d+)": lambda now, a, b: now - a * b,
    r"gives (\d+) \w+ to each of (\d+)": lambda now, a, b: now - a * b,
    r"each of (\d+) storms (\d+)": lambda now, a, b: now - a * b,
    "as many": lambda now: 2 * now,
    r"into (\d+) bags": lambda now, a: now / a,
}


@pytest.mark.parametrize("events", [2, 5])
def test_problems_of_several_steps_have_the_answer_that_their_words_ask_for(
    events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts" / "real")
    steps = script("steps")
    files = dict(steps.files(dict.fromkeys(steps.EVENTS, events)))
    assert dict(steps.files(dict.fromkeys(steps.EVENTS, events))) == files
    asked = [row["problem"] for rows in files.values() for row in rows]
    assert len(asked) == len(set(asked))
    for row in (row for rows in files.values() for row in rows):
        now = 0
        for sentence in re.split(r"[.?]", row["problem"]):
            for words, change in READ.items():
                if found := re.search(words, sentence):
                    now = change(now, *map(int, found.groups()))
        assert now == int(row["answer"]) >= 0, row
        for line in row["solution"].rstrip(".").split(", "):
            left, right = line.replace("x", "*").split(" = ")
            assert eval(left) == int(right), row
        assert grade_answer(NUMERIC, row["solution"], row["answer"])[1]
    assert not {*steps.OTHER} & {*steps.TRAINED}


def test_what_is_sampled_outside_can_be_rendered_with_another_system_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts" / "real")
    sample = script("sample")
    folder = save_model(tmp_path / "model", "student", "qwen3", 1)
    student = object.__new__(sample.Student)  # llama.cpp is not among the dependencies
    student.server, student.tokenizer = SimpleNamespace(listening_address=""), AutoTokenizer.from_pretrained(folder)
    student.tokenizer.chat_template = "{% for turn in messages %}{{ turn.content }}\n{% endfor %}"
    student.tokenizer.save_pretrained(folder)
    stop = student.tokenizer.eos_token_id
    for number, (tokens, reason) in enumerate([([3, stop], "eos"), ([3], "eos"), ([3, 4], "limit")]):
        found = json.dumps({"tokens": tokens, "stop_type": reason, "content": "12"}).encode()
        monkeypatch.setattr(sample, "Request", lambda *_: None)
        monkeypatch.setattr(sample, "urlopen", lambda _, found=found: io.BytesIO(found))
        rows = [json.dumps({"id": str(each), "problem": f"{each} + 10", "answer": "12"}) for each in range(number + 1)]
        (tmp_path / "problems.jsonl").write_text("\n".join(rows))
        sample.answers(student, tmp_path / "problems.jsonl", tmp_path / "rollouts.jsonl")
    recipe = {"name": "sampled", "student": {"model": str(folder)}, "runs": str(tmp_path)}
    groups = own_trajectories(run_of({**recipe, "rollout": {"from": str(tmp_path / "rollouts.jsonl"), "responses": 1}}))
    assert [group.responses[0].ids for group in groups] == [[3, stop], [3, stop], [3, 4]]
    assert [group.responses[0].finish for group in groups] == ["stop", "stop", "length"]
    assert all(group.prompt.form is not None for group in groups)


def test_the_specialist_learns_the_same_row_by_row(tmp_path: Path) -> None:
    """The loss of a batch is the mean over its tokens, however many rows are in memory at once."""
    expert, losses = script("expert"), []
    rows = [([1, 2, 3, 4], [-100, 2, 3, 4]), ([5, 6, 7], [-100, -100, 7]), ([8, 9, 3, 2, 1], [-100, 9, 3, 2, 1])]
    folder = save_model(tmp_path / "model", "student", "qwen3", 1)
    for at_once in (8, 1):
        model = AutoModelForCausalLM.from_pretrained(folder)
        losses.append(expert.fine_tune(model, list(rows), 0, 3, at_once))
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_the_recipes_are_whole() -> None:
    reasoning = load_recipe(ROOT / "recipes" / "real-reasoning.toml", [])
    assert {composition.kl_budget for composition in reasoning.compositions.values()} == {0.1}  # type: ignore[union-attr]
    parts = [ROOT / "recipes" / name for name in ("real.toml", "real-more.toml")]
    recipe = load_recipe(parts, [])
    budgets = {composition.kl_budget for composition in recipe.compositions.values()}  # type: ignore[union-attr]
    assert len(budgets) == 1, "the same for all"
    page = script("page")
    assert set(page.KINDS) == {"base", *recipe.compositions, *recipe.policies}
    parts += [ROOT / "recipes" / f"real-{name}.toml" for name in ("contrast", "effort", "effort-asked")]
    more = load_recipe(parts, [])
    assert set(more.compositions) - set(recipe.compositions) == {"contrast", "effort"}
    assert all(composition.kl_budget in budgets for composition in more.compositions.values())  # type: ignore[union-attr]


def means_of(rng: np.random.Generator, problems: int) -> ProblemMeans:
    accuracy = rng.choice([0.0, 100.0], size=problems)
    return ProblemMeans("same", tuple(map(str, range(problems))), accuracy, rng.integers(5, 64, problems).astype(float))


def test_intervals_are_those_of_a_plain_loop_over_problems_drawn_together() -> None:
    page, rng = script("page"), np.random.default_rng(0)
    page.RESAMPLES = 1000
    seeds = {name: [means_of(rng, 12) for _ in range(count)] for name, count in (("one", 3), ("two", 3), ("base", 1))}
    one, two, base = (page.Policy(page.average(runs), runs) for runs in seeds.values())
    found = page.against(one, two, base)
    differences: dict[str, list[float]] = {"accuracy": [], "tokens": [], "aes": []}
    drawn = [list(range(12)), *(row.tolist() for rows in resample(12, 1000, 0, "same") for row in rows)]
    for problems in drawn:
        points = {}
        for name, runs in seeds.items():
            pairs = [(run.accuracy[i], run.tokens[i]) for run in runs for i in problems]
            points[name] = (sum(a for a, _ in pairs) / len(pairs), sum(t for _, t in pairs) / len(pairs))
        differences["accuracy"].append(points["one"][0] - points["two"][0])
        differences["tokens"].append(points["one"][1] - points["two"][1])
        differences["aes"].append(aes(*points["one"], *points["base"]) - aes(*points["two"], *points["base"]))
    for quantity, values in differences.items():
        interval = getattr(found, quantity)
        known = [value for value in values[1:] if not np.isnan(value)]
        low, high = np.percentile(known, [2.5, 97.5])
        assert [interval.estimate, interval.low, interval.high] == pytest.approx([values[0], low, high], abs=1e-9)
    assert page.verdict(found.tokens, 1) == page.verdict(
        type(found.tokens)(-found.tokens.estimate, -found.tokens.high, -found.tokens.low), -1
    )


@pytest.mark.slow
def test_the_page_says_what_is_there_and_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "real"))
    page, tasks, more = script("page"), script("tasks"), script("more")
    page.RESAMPLES = 200
    data = tmp_path / "real-data"
    tasks.write(data)
    runs = [tmp_path / "real", tmp_path / "real-2"]
    for number, run in enumerate(runs):
        for policy, right in (("base", 24), ("brief", 12 + 12 * number), ("weave-50", 48)):
            for name in ("same", "other"):
                benchmark = load_benchmark(f"file:{data / f'{name}.jsonl'}")
                samples = [
                    Sample(
                        problem=problem.id,
                        sample=0,
                        seed=0,
                        tokens=40 if policy == "base" else 10,
                        finish="stop",
                        text=f"says {policy}",
                        answer="1",
                        correct=at < right,
                        why="",
                        cuts={},
                    )
                    for at, problem in enumerate(benchmark.problems)
                ]
                folder = run / "eval" / policy / name
                folder.mkdir(parents=True)
                protocol = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 64, "grading": "numeric"}
                write_summary(folder / "summary.json", summarise(benchmark, samples, protocol))
                (folder / "samples.jsonl").write_text("".join(json.dumps(asdict(one)) + "\n" for one in samples))
        row = {"stage": "rollout", "name": "", "device_seconds": 60.0, "tokens": 600, "device": "CPU", "threads": 1}
        row |= {"versions": {"torch": "2", "transformers": "5"}, "bytes": 0, "peak_memory": 0, "rank": 0, "time": 0.0}
        (run / "ledger.jsonl").write_text(json.dumps(row) + "\n")
    text = page.page(runs, data)
    assert "left out: right, weave-25" in text
    (brief,) = (
        line for line in text.split("## Results")[1].split("The two kinds")[0].splitlines() if "| brief |" in line
    )
    assert brief.startswith("| brief | 2 | 18.8 | 12.5, 25.0 | -6.2 [")
    assert "| *brief* is shorter than the base | **holds** | tokens -30.0 [-30.0, -30.0] |" in text
    assert "| *right* is more accurate than the base | not measured | |" in text
    assert "| rollout | 2.0 | 1,200 | 10 |" in text
    first = json.loads((data / "same.jsonl").read_text().splitlines()[24])
    assert f"**Base wrong, weave-50 right and shorter.** {first['problem']} ({first['answer']})" in text
    assert "**Base right, weave-50 wrong.** No problem." in text
    assert "| weave-50 | 96 | 25.0 | 50.0 |" in text
    readme = page.readme(page.read_policies(runs, "same"))
    assert (
        "| the student | 25 % | 40 |\n| the student trained with two anchors, *brief* and *right* | 50 % | 10 |"
        in readme
    )
    assert "(96 problems, 2 training seeds, `make real`)" in readme
    page.draw(page.read_policies(runs, "same"), tmp_path / "frontier.svg")
    assert "weave-50" in (tmp_path / "frontier.svg").read_text()

    more.MODELS = tmp_path / "real-models.md"
    more.MODELS.write_text(text.replace("| 10.0 |", "| 12.0 |", 1))
    same = {"accuracy_low": 10, "accuracy_high": 20, "tokens_low": 8, "tokens_high": 12, "aes_low": -2, "aes_high": 0}
    same |= {"largest_trusted": None}
    point = {
        "alpha": 1.0,
        "accuracy": 12,
        "tokens": 10,
        "aes": -1.0,
        **same,
        "effective_samples": 31.2,
        "trusted": True,
    }
    far = {"tokens": 9, "aes": 0.5, "accuracy": 90, "accuracy_low": 80, "accuracy_high": 100, "effective_samples": 2.0}
    far |= {"trusted": False, "largest_trusted": {"alpha": 4.0, "kl": 0.02}}
    points = [{"policy": "base"}, {"policy": "brief", **point}, {"policy": "weave-50", **point, **far}]
    (tmp_path / "points.json").write_text(json.dumps(points))
    lines = list(more.forecast(tmp_path / "points.json"))
    assert lines[2].endswith("| 2 ? | alpha 4, KL 0.02 |")
    assert lines[3].startswith("| brief | 1 | 12.0 [10.0, 20.0] | 18.8 | 10.0 [8.0, 12.0] | 12.0 |")
    assert lines[3].endswith("| 31 |  |")
    assert lines[-3].startswith("| accuracy | 23.4 | +16.6 | 1.00 | 1 of 2 |")


def test_what_models_can_do_alone_and_what_survives_another_tokenizer_is_counted(tmp_path: Path) -> None:
    page = script("page")
    run, data = tmp_path / "real", tmp_path / "real-data"
    data.mkdir()
    assert [*page.gym(data), *page.family(run, data)] == [], "nothing was measured"
    (data / "gym.json").write_text(json.dumps({"problems": 12, "right": {"gcd": 3, "products": 7}}))
    assert list(page.gym(data))[-2:] == ["| products | 7 |", "| gcd | 3 |"]
    found = {"problems": 8, "right": 3, "by_kind": {"sum": 1, "times": 2}}
    (data / "gemma.json").write_text(json.dumps(found))
    folder = run / "score" / "gemma-1a2b3c"
    folder.mkdir(parents=True)
    mapped = np.ones((4, 2), dtype=bool)
    mapped[0] = mapped[1, 0] = False
    save_file({"mapped": mapped}, folder / "00000.safetensors")
    row = {"stage": "score", "name": "gemma-1a2b3c", "device_seconds": 90.0, "tokens": 1, "bytes": 0, "peak_memory": 0}
    (run / "ledger.jsonl").write_text(json.dumps(row) + "\n")
    text = " ".join(page.family(run, data))
    for words in (
        "3 of 8 right",
        "37.5 %; sum 1, times 2",
        "62.5 % are one token",
        "50.0 % of the decisions",
        "1.5 min",
    ):
        assert words in text


def test_forgetting_is_the_kl_over_the_whole_vocabulary() -> None:
    forgetting = script("forgetting")
    torch.manual_seed(0)
    base, policy = ([torch.log_softmax(torch.randn(n, 7), dim=-1) for n in (2, 5)] for _ in range(2))
    each = [
        sum(p.exp().item() * (p - q).item() for p, q in zip(one, two, strict=True))
        for ones, twos in zip(base, policy, strict=True)
        for one, two in zip(ones, twos, strict=True)
    ]
    assert forgetting.mean_kl(base, policy) == pytest.approx(sum(each) / 7, abs=1e-5)
    assert forgetting.mean_kl(base, base) == 0


def test_the_specialist_learns_from_right_and_finished_answers_only(tmp_path: Path) -> None:
    expert = script("expert")
    rows = [
        {"problem": "a", "text": "4", "correct": True, "finish": "stop"},
        {"problem": "a", "text": "4", "correct": True, "finish": "stop"},
        {"problem": "a", "text": "4 and so", "correct": True, "finish": "length"},
        {"problem": "b", "text": "5", "correct": False, "finish": "stop"},
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = [{"id": "a", "problem": "2+2"}, {"id": "b", "problem": "2+4"}]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    assert expert.right_answers(tmp_path / "samples.jsonl", tmp_path / "problems.jsonl") == [("2+2", "4")]
