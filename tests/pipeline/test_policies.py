"""Policies that are not trained: merged weights, another way to be asked, a forced answer, the target itself."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from lightning_weave.bench.definitions import load_eval_benchmark
from lightning_weave.bench.samples import Sample, read_samples
from lightning_weave.bench.summary import differing
from lightning_weave.checks.preflight import preflight
from lightning_weave.config import check_recipe
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.report.results import summaries
from lightning_weave.run import Run
from lightning_weave.stages import eval as stage
from lightning_weave.stages.decoding import ANSWER_TOKENS, ForcedSampler, open_target
from lightning_weave.stages.preview import preview
from lightning_weave.stages.prompts import render_problems
from lightning_weave.stages.score import make_cache
from lightning_weave.stages.train import train
from lightning_weave.views.clean import unneeded_folders
from pipeline.evaluated import evaluation_recipe, folder_of
from tiny import make_tokenizer, make_world, run_of, save_model

QUIET = Progress(quiet=True)


@pytest.fixture
def recipe(tmp_path: Path) -> dict:
    return evaluation_recipe(tmp_path) | {"anchors": make_world(tmp_path, prompts=4)["anchors"]}


def samples_of(recipe: dict, policy: str) -> list[Sample]:
    return list(read_samples(folder_of(recipe, policy) / "samples.jsonl"))


def test_a_merged_policy_is_made_once_and_evaluated(recipe: dict, tmp_path: Path) -> None:
    student = Path(recipe["student"]["model"])
    post = save_model(tmp_path / "tuned", "student", "qwen3", 9, student)
    recipe["anchors"] = {"tuned": {"post": str(post), "pre": str(student)}}
    recipe["policies"] = {
        "whole": {"merge": "task-arithmetic", "weights": {"tuned": 1.0}},
        "half": {"merge": "linear", "weights": {"tuned": 0.5}},
        "tuned-itself": {"model": str(post)},
    }
    run = run_of(recipe)
    stage.evaluate(run, QUIET, only=["whole", "half", "tuned-itself", "base"])
    before = load_file(student / "model.safetensors"), load_file(post / "model.safetensors")
    found = load_file(run.policy("half").path / "model.safetensors")
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, (before[0][name] + before[1][name]) / 2)
    assert [one.text for one in samples_of(recipe, "whole")] == [one.text for one in samples_of(recipe, "tuned-itself")]
    found_points = summaries(run)
    assert found_points.keys() == {"base", "whole", "half", "tuned-itself"}
    assert not any(differing(one, found_points["base"][0]) for (one,) in found_points.values())

    made = run.stage("merge", "whole").manifest_path
    assert made.parent.parent == run.directory / "merge"
    stamp = made.stat().st_mtime_ns
    recipe["eval"] |= {"samples": 2}
    stage.evaluate(run_of(recipe), QUIET, only=["whole"])
    assert made.stat().st_mtime_ns == stamp, "another evaluation uses the same weights"
    recipe["policies"]["whole"]["weights"] = {"tuned": 0.9}
    other = run_of(recipe)
    assert not other.stage("merge", "whole").complete
    stage.evaluate(other, QUIET, only=["whole"])
    assert made.exists(), "another weight is another folder"
    assert made.parent in unneeded_folders([other])


def test_what_cannot_be_merged_is_refused_before_anything_is_spent(recipe: dict) -> None:
    recipe["policies"] = {"merged": {"merge": "task-arithmetic", "weights": {"acc": 1.0}}}
    run = run_of(recipe)
    (finding,) = (one for one in preflight(run) if one.check == "merge")
    assert finding.verdict == "error"
    assert "policies.merged.weights.acc: " in finding.text
    with pytest.raises(InputError, match=r"policies\.merged\.weights\.acc: .*cannot be merged with"):
        stage.evaluate(run, QUIET, only=["merged"])
    assert not (run.directory / "merge" / "merged").exists()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({}, "policies.x = {}: is the same as base"),
        ({"merge": "ties"}, "merge and weights belong together"),
        ({"merge": "ties", "weights": {"acc": 1.0}, "model": "m"}, "model and merge cannot be combined"),
        (
            {"merge": "ties", "weights": {"nobody": 1.0}},
            "policies.x.weights names 'nobody'; known: acc, brief, told, both, live",
        ),
        ({"merge": "linear", "weights": {"acc": 1.0}, "density": 0.5}, 'density is for merge = "ties" or "dare"'),
        ({"merge": "linear", "weights": {"told": 1.0}}, "policies.x.weights names 'told', a context"),
        ({"decode": "nothing"}, "policies.x.decode = 'nothing': no such composition"),
        ({"decode": "live"}, "policies.x.decode = 'live': its method is online"),
        ({"decode": "both", "system": "Be brief."}, "decode uses the prompts"),
        ({"budget": 14}, "policies.x.budget = 14 must be less than eval.max_tokens = 14"),
        ({"template": {"reasoning_effort": "low"}}, "policies.x.template needs a chat template"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(policy: dict, message: str) -> None:
    recipe = {
        "name": "tiny",
        "student": {"model": "student"},
        "anchors": {
            "acc": {"post": "a", "pre": "b"},
            "brief": {"post": "c", "pre": "d"},
            "told": {"model": "student", "post_prompt": {"prefix": "Be brief. "}},
        },
        "compositions": {
            "both": {"weights": {"acc": 0.5, "brief": 0.5}},
            "live": {"weights": {"acc": 1.0}, "method": "online"},
        },
        "policies": {"x": policy},
        "eval": {"max_tokens": 14, "chat": False},
    }
    with pytest.raises(InputError) as error:
        check_recipe(recipe)
    assert message in str(error.value)


def test_a_policy_may_be_asked_in_another_way(recipe: dict) -> None:
    """A system prompt, thinking and variables of the template reach the prompt, and the results stay comparable."""
    from transformers import AutoTokenizer

    path = recipe["student"]["model"]
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if enable_thinking %}wait{% endif %}{{ effort }}"
    )
    tokenizer.save_pretrained(path)
    recipe["eval"] |= {"chat": True, "max_tokens": 4}
    recipe["policies"] = {
        "told": {"system": "Be brief."},
        "quick": {"thinking": False},
        "low": {"template": {"effort": "hmm"}},
    }
    run = run_of(recipe)
    (name,) = run.recipe.eval.benchmarks
    benchmark = load_eval_benchmark(run.recipe, name)
    texts = {
        policy: render_problems(benchmark, tokenizer, run.recipe.asked(policy), None)[0].text for policy in run.policies
    }
    question = texts["quick"]
    assert texts == {
        "base": f"{question}wait",
        "told": f"system: Be brief.\n{question}wait",
        "quick": question,
        "low": f"{question}waithmm",
    }
    stage.evaluate(run, QUIET)
    found = summaries(run)
    assert not any(differing(one, found["base"][0]) for (one,) in found.values())
    assert len({run.stage("eval", policy, name).fingerprint for policy in run.policies}) == 4
    recipe["harness"] = {"tasks": ["ifeval"]}  # other harnesses ask in their own way, so they get checkpoints alone
    assert [stage.path for stage in run_of(recipe).stages("harness")] == ["eval/base/lm-eval-ifeval"]


def test_a_budget_forces_the_answer(recipe: dict) -> None:
    """What ends within the budget is the student's; the rest is its beginning, the text, and a few tokens."""
    recipe["eval"] |= {"final": " \\boxed{", "max_tokens": 60}
    recipe["policies"] = {"capped": {"budget": 5}}
    stage.evaluate(run_of(recipe), QUIET)
    forced = 0
    for plain, capped in zip(samples_of(recipe, "base"), samples_of(recipe, "capped"), strict=True):
        if plain.tokens <= 5 and plain.finish == "stop":
            assert capped == plain
            continue
        forced += 1
        beginning = plain.text[: plain.cuts[5]]
        assert capped.text.startswith(f"{beginning} \\boxed{{")
        assert 5 < capped.tokens <= 5 + 14 + ANSWER_TOKENS
    assert forced > 0
    recipe["eval"]["final"] = " \\boxed{1"
    assert not run_of(recipe).stage("eval", "capped", recipe["eval"]["benchmarks"][0]).complete
    assert run_of(recipe).stage("eval", "base", recipe["eval"]["benchmarks"][0]).complete


def test_a_forced_answer_ends_thinking_only_where_it_goes_on() -> None:
    tokenizer = make_tokenizer("student")
    tokenizer.add_tokens(["<think>", "</think>"])
    sampler = ForcedSampler(None, 5, tokenizer, " Answer")  # type: ignore[arg-type]
    for before, ended in (
        ("Question", ""),
        ("Question<think> hmm", "\n</think>\n\n"),
        ("Question<think> hmm</think> Answer", ""),  # also a template that switches thinking off
        ("Question<think>1</think>2<think>3", "\n</think>\n\n"),
    ):
        ids = sampler._opening(tokenizer.encode(before))
        assert tokenizer.decode(ids) == f"{ended} Answer", before


def test_the_samples_of_a_target_depend_on_the_updates_that_its_dose_is_solved_on(recipe: dict) -> None:
    weights = {"acc": 0.5, "brief": 0.5}
    recipe["compositions"] = {"given": {"weights": weights}, "solved": {"weights": weights, "kl_budget": 0.02}}
    recipe["policies"] = {f"{name}-target": {"decode": name} for name in recipe["compositions"]}

    def fingerprints(**train: object) -> list[str]:
        run = run_of({**recipe, "train": {**recipe.get("train", {}), **train}})
        return [run.stage("eval", name, recipe["eval"]["benchmarks"][0]).fingerprint for name in recipe["policies"]]

    given, solved = fingerprints()
    for key, value in {"seed": 7, "prompts_per_round": 8, "epochs": 3, "validation": 0.5}.items():
        assert fingerprints(**{key: value})[0] == given
        assert fingerprints(**{key: value})[1] != solved, key
    assert fingerprints(learning_rate=1e-4) == [given, solved]


@pytest.mark.slow
def test_decoding_samples_from_the_target(tmp_path: Path) -> None:
    """The samples are those of the preview; a KL budget is that of training."""
    recipe = make_world(tmp_path, prompts=6)
    lines = [json.dumps({"id": f"q{n}", "problem": f"{n}+1", "answer": str(n + 1)}) for n in range(3)]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    recipe["eval"] = {"benchmarks": [f"file:{tmp_path / 'sums.jsonl'}"], "samples": 2, "max_tokens": 6, "chat": False}
    weights = {"acc": 0.5, "brief": 0.5}
    recipe["compositions"] = {
        "both": {"weights": weights},
        "dosed": {"weights": weights, "kl_budget": 0.02},
    }
    recipe["policies"] = {"decoded": {"decode": "both"}, "decoded-dose": {"decode": "dosed"}}
    run = run_of(recipe)
    stage.evaluate(run, QUIET, only=["decoded", "base"])
    preview(run, QUIET, Console(quiet=True), problems=3, only=["both"])
    expected = list(read_samples(run.directory / "preview" / "both" / "sums" / "samples.jsonl"))
    assert samples_of(recipe, "decoded") == expected
    assert samples_of(recipe, "decoded") != samples_of(recipe, "base")
    assert Run(run.recipe, existing=True).stage("eval", "decoded", recipe["eval"]["benchmarks"][0]).complete

    with pytest.raises(InputError, match="rollout is not there yet"):
        stage.evaluate(run, QUIET, only=["decoded-dose"])
    make_cache(run, QUIET)
    train(run, QUIET, only=["dosed"])
    alpha = run.stage("train", "dosed").require()["alpha"]
    assert open_target(run, "dosed", {}).alpha == pytest.approx(alpha)
    longer = {**recipe["compositions"]["dosed"], "epochs": 2}
    compositions = {"longer": longer, "refreshed": {**longer, "refresh": 2}}
    more = run_of({**recipe, "policies": {}, "compositions": compositions})
    assert open_target(more, "refreshed", {}).alpha == open_target(more, "longer", {}).alpha
    stage.evaluate(run, QUIET, only=["decoded-dose"])

    recipe["anchors"]["acc"]["kl_budget"] = 0.01  # the weight of this anchor is solved, too
    run = run_of(recipe)
    make_cache(run, QUIET)
    target = open_target(run, "both", {})
    benchmark = load_eval_benchmark(run.recipe, recipe["eval"]["benchmarks"][0])
    target.anchors.set_prompts(render_problems(benchmark, run.student.tokenizer, run.recipe.eval, None))
    train(run, QUIET, only=["both"])
    doses = {one["anchor"]: one["dose"] for one in run.stage("train", "both").require()["budgets"]}
    expected_K = [2.0 * doses[name] for name in ("acc", "brief")]
    assert target.anchors._weight_GK is not None
    torch.testing.assert_close(torch.tensor(target.anchors._weight_GK[0]), torch.tensor(expected_K), rtol=1e-4, atol=0)

    recipe["tags"] = {"rules": {"own": r"^\D*\d\+\d\D*$"}}  # no cached prompt is so short
    recipe["compositions"]["both"]["weights"] = {"own": weights, "default": weights}
    run = run_of(recipe)
    with pytest.raises(InputError, match="'own'"):
        open_target(run, "both", {}).anchors.set_prompts(
            render_problems(benchmark, run.student.tokenizer, run.recipe.eval, None)
        )
