"""Every wrong recipe gives exit code 2 and one or two lines that name the key, its value and what is allowed."""

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_weave.config import check_recipe, load_recipe
from lightning_weave.config.composition import METHODS
from lightning_weave.config.recipe import MOVED
from lightning_weave.errors import InputError
from lightning_weave.views.keys import recipe_keys

GOOD = """
name = "mine"
[student]
model = "models/student"
[anchors.acc]
post = "models/acc-post"
pre = "models/acc-pre"
[anchors.brief]
post = "models/brief-post"
pre = "models/brief-pre"
[compositions.both]
weights = { acc = 0.5, brief = 0.5 }
[prompts]
source = "prompts.jsonl"
[eval]
benchmarks = ["aime-2024", "aime-2025", "hmmt-feb-2025"]
"""

# (what is written below the good recipe or set over it, what the message must say)
WRONG = [
    # unknown keys, with the nearest one
    ("studnet.model=x", ["unknown key studnet", "Did you mean student?"]),
    ("student.modle=x", ["unknown key student.modle", "Did you mean student.model?"]),
    ("anchors.acc.pots=x", ["unknown key anchors.acc.pots", "Did you mean anchors.acc.post?"]),
    ("compositions.both.weight={acc=1}", ["unknown key compositions.both.weight", "Did you mean"]),
    ("compositions.both.aplha=1", ["compositions.both.aplha", "Did you mean compositions.both.alpha?"]),
    ("rollout.temprature=1", ["rollout.temprature", "Did you mean rollout.temperature?"]),
    ("rollout.form='x.jsonl'", ["rollout.form", "Did you mean rollout.from?"]),
    ("train.learningrate=1", ["train.learningrate", "Did you mean train.learning_rate?"]),
    ("train.lora.rnk=4", ["train.lora.rnk", "Did you mean train.lora.rank?"]),
    ("prompts.columns.promt='q'", ["prompts.columns.promt", "Did you mean prompts.columns.prompt?"]),
    ("zzz=1", ["unknown key zzz", "Known here: name"]),
    # wrong types
    ("name=3", ["name = 3", "must be a valid string"]),
    ("train=3", ["train = 3", "must be a table"]),
    ("anchors.acc='x'", ["anchors.acc", "must be a table"]),
    ("train.learning_rate='fast'", ["train.learning_rate", '"fast"', "must be a valid number"]),
    ("train.epochs=1.5", ["train.epochs = 1.5", "must be a valid integer"]),
    ("train.epochs='2'", ["train.epochs", "must be a valid integer"]),
    ("train.compile='yes'", ["train.compile", "must be a valid boolean"]),
    ("train.optimizer.betas=[0.9]", ["train.optimizer.betas", "at least 2"]),
    ("train.lora.targets=3", ["train.lora.targets = 3", "must be a valid list"]),
    ("engine.options={a=[1]}", ["engine.options.a", "must be a valid"]),
    ("checks.truncated='stop'", ['checks.truncated = "stop"', "a number of at least 0, or 'warn' or false"]),
    ("checks.truncated=true", ["checks.truncated = true", "a number of at least 0"]),
    ("checks.swapped='warn'", ["checks.swapped", "a number of at least 0, or false"]),
    ("train.agreement=-1", ["train.agreement = -1", "a number of at least 0, or false"]),
    ("eval.benchmarks='aime-2024'", ["eval.benchmarks", "must be a valid list"]),
    ("compositions.both.weights=[1]", ["compositions.both.weights", "must be a table"]),
    ("compositions.both.weights={acc='half', brief=0.5}", ["compositions.both.weights.acc", "must be a valid number"]),
    # values out of range
    ("compositions.both.weights={acc=0.5, brief=0.6}", ["compositions.both.weights", "sum to 1", "1.1"]),
    ("compositions.both.weights={acc=-0.5, brief=1.5}", ["compositions.both.weights", "non-negative"]),
    ("compositions.both.weights={acc=nan, brief=1.0}", ["compositions.both.weights.acc", "finite"]),
    ("compositions.both.weights={}", ["compositions.both.weights = {}", "give each anchor its share"]),
    ("compositions.x={alpha=1.0}", ["compositions.x.weights is missing", "weights = { a = 0.5, b = 0.5 }"]),
    ("compositions.both.alpha=0", ["compositions.both.alpha = 0", "greater than 0"]),
    ("compositions.both.alpha=-2.0", ["compositions.both.alpha = -2.0", "greater than 0"]),
    ("compositions.both.alpha=inf", ["compositions.both.alpha", "finite"]),
    ("compositions.both.objective='tilt'", ["compositions.both.objective", "'tilted'", "'direct-opd'"]),
    ("compositions.x={weights={acc=1.0}, alpha=1.0, kl_budget=0.1}", ["set either kl_budget or alpha"]),
    ("compositions.x={weights={acc=0.0}, normalize=false}", ["compositions.x.weights", "weights are all 0"]),
    ("compositions.both.refresh='often'", ['compositions.both.refresh = "often"', "a valid integer or 'auto'"]),
    ("compositions.both.refresh=0", ["compositions.both.refresh = 0", "greater than or equal to 1"]),
    ("compositions.both.refresh_budget=3", ["compositions.both.refresh_budget = 3", 'is for refresh = "auto"']),
    ("compositions.x={weights={acc=1.0}, refresh='auto', refresh_budget=1}", ["refresh_budget = 1", "equal to 2"]),
    ("compositions.x={weights={acc=1.0}, method='online', refresh='auto'}", ['method = "online" has no refresh']),
    ("compositions.both.kl_budget=-1.0", ["compositions.both.kl_budget = -1.0", "greater than 0"]),
    ("rollout.responses=0", ["rollout.responses = 0", "greater than or equal to 1"]),
    ("rollout.temperature=-1", ["rollout.temperature = -1", "greater than or equal to 0"]),
    ("eval.top_p=0", ["eval.top_p = 0", "greater than 0"]),
    ("eval.top_p=1.1", ["eval.top_p = 1.1", "less than or equal to 1"]),
    ("rollout.max_tokens=0", ["rollout.max_tokens = 0"]),
    ("engine.rollout='sglang'", ["engine.rollout", "'hf' or 'vllm'"]),
    ("engine.dtype='int8'", ["engine.dtype", "'float32'", "by stage"]),
    ("engine.dtype={train='float32'}", ["engine.dtype", "(rollout, reference, score, eval)"]),
    ("engine.options={train={a=1}}", ["engine.options", "train is a table", "(rollout, reference, score, eval)"]),
    ("anchors.acc.engine='sglang'", ["anchors.acc.engine", "'hf', 'vllm', or the URL"]),
    ("anchors.acc.engine={past='hf'}", ["anchors.acc.engine.past", "'post' or 'pre'"]),
    ("anchors.acc.options={a=1}", ["anchors.acc", 'options need engine = "vllm"']),
    ("rollout.seed=-1", ["rollout.seed = -1"]),
    ("reference.candidates=0", ["reference.candidates = 0"]),
    ("prompts.format='chatml'", ["prompts.format", "'plain', 'dapo'"]),
    ("prompts.format='Solve it.'", ["prompts.format", "a template with {problem}"]),
    ("prompts.format='{problem} \\boxed{}'", ["prompts.format", "double literal braces"]),
    ("prompts.format='{problem'", ["prompts.format", "such as \\boxed{{}}"]),
    ("eval.format='dapo'", ["eval.format", "'question-answer', 'boxed', or a template"]),
    ("prompts={system='x', chat=false}", ["system needs chat = true"]),
    ("eval.graders.aime-2042='exact'", ["eval.graders", "'aime-2042' is not in eval.benchmarks"]),
    ("eval.graders.aime-2024='exakt'", ["eval.graders", "'math-verify', 'exact'"]),
    ("eval.graders.aime-2024='exact:0.1'", ["eval.graders", "aime-2024: must be one of", "'numeric:TOLERANCE'"]),
    ("eval.graders.aime-2024='numeric:much'", ["eval.graders", "numeric takes a tolerance"]),
    ("eval.graders.aime-2024='regex:'", ["eval.graders", "needs a pattern"]),
    ("eval.graders.aime-2024='regex:('", ["eval.graders", "not a regular expression"]),
    ("eval.graders.aime-2024='python'", ["eval.graders", "my.py:grade"]),
    ("eval.graders.aime-2024={kind='regex'}", ["eval.graders.aime-2024", 'must be one text, such as "exact"']),
    ("harness.args={tasks=['x']}", ["harness.args", "set by harness.tasks"]),
    ("harness.args={model_args='a=1'}", ["harness.args", "model_args must be a table"]),
    ("tracking.name='{seed}'", ["tracking", "{run} and {policy}"]),
    ("prompts.dedup='fuzzy'", ["prompts.dedup", "'exact'"]),
    ("train.learning_rate=0", ["train.learning_rate = 0", "greater than 0"]),
    ("train.optimizer.betas=[0.9, 1.0]", ["train.optimizer.betas.1 = 1.0", "less than 1"]),
    ("train.validation=1.0", ["train.validation", "less than 1"]),
    ("train.updates_per_round=3", ["train.updates_per_round is 3", "256 trajectories"]),
    ("eval.samples=0", ["eval.samples = 0"]),
    ("eval.benchmarks=['file:a/x.jsonl', 'file:b/x.jsonl']", ["eval.benchmarks", "same name"]),
    (
        "eval.sources={aime-2024='here.jsonl', aime-2042='there.jsonl'}",
        [
            "eval.sources = ",
            "'aime-2042' is not in eval.benchmarks (aime-2024, aime-2025, hmmt-feb-2025)",
            "add it there or remove it",
        ],
    ),
    (
        "eval={benchmarks=['file:x.jsonl'], sources={'file:x.jsonl'='y.jsonl'}}",
        ["eval.sources", "'file:x.jsonl' already names its file"],
    ),
    ("name='../escape'", ["name", "plain name"]),
    ("anchors.'a/b'={post='x', pre='y'}", ["anchors.a/b", "plain name"]),
    # contexts
    ("anchors.x={}", ["anchors.x = {}", "post is missing", "model and post_prompt"]),
    ("anchors.acc.model='student'", ["anchors.acc", "model replaces post and pre"]),
    ("anchors.x={model='student'}", ["anchors.x", "same context on both sides", "Set post_prompt"]),
    ("anchors.x={model='m', post_prompt={systm='a'}}", ["anchors.x.post_prompt.systm", "post_prompt.system?"]),
    ("anchors.x={model='m', post_prompt={template='Hi'}}", ["anchors.x.post_prompt.template", "needs {prompt}"]),
    (
        "anchors.x={model='m', post_prompt={template='{prompt'}}",
        ["x.post_prompt.template", "double literal braces"],
    ),
    ("anchors.x={model='m', post_prompt={prefix=''}}", ["anchors.x.post_prompt.prefix", "at least 1"]),
    ("anchors.x={model='m', post_prompt={prefix='a'}, missing='mask'}", ["anchors.x", "there are none"]),
    ("anchors.x={model='m', post_prompt={prefix='a'}, missing='drop'}", ["anchors.x.missing", "'refuse' or 'mask'"]),
    (
        "anchors.x={model='student', post_prompt={prefix='a'}, trust_remote_code=true}",
        ["anchors.x", "takes trust_remote_code from [student]"],
    ),
    # rules of shifts
    ("anchors.acc.shift.clip=0", ["anchors.acc.shift.clip = 0", "greater than 0"]),
    ("anchors.acc.shift.only_above=-1.0", ["anchors.acc.shift.only_above = -1.0", "greater than 0"]),
    ("anchors.acc.shift.mass_floor=1.5", ["anchors.acc.shift.mass_floor = 1.5", "less than 1"]),
    ("anchors.acc.shift.temperature=inf", ["anchors.acc.shift.temperature", "finite"]),
    # weights by tag
    ("compositions.both.weights={math={acc=1.0}, acc=0.5}", ["compositions.both", "mix tables by tag", "'acc'"]),
    ("compositions.both.weights={math={acc=0.7}}", ["compositions.both.weights", "math", "sum to 1"]),
    ("compositions.both.weights={math={acc=1.0}}", ["compositions.both.weights differ by tag", "add [tags]"]),
    ("compositions.both.weights={math={acc='x'}}", ["compositions.both.weights.math.acc", "must be a valid number"]),
    ("compositions.both.weights={math={}}", ["compositions.both.weights", "give each anchor its share"]),
    ("compositions.both.routes={math={acc=1.0}}", ["compositions.both", "has no key routes; write weights"]),
    (
        "compositions.both={method='mixture', weights={math={acc=1.0}}}",
        ["compositions.both.weights", "weights by tag are for joint training; mixture"],
    ),
    ("tags={column='kind', rules={math='x'}}", ["tags", "column and rules"]),
    ("tags.rules={math='('}", ["tags.rules.math", "'(' is not a regular expression"]),
    # names that do not fit together
    ("compositions.both.weights={acc=0.5, klear=0.5}", ["'klear'", "known anchors: acc, brief"]),
    ("policies.base.model='x'", ["policies.base", "the student itself"]),
    ("policies.both.model='x'", ["policies.both", "a composition"]),
    ("compositions.base.weights={acc=1.0}", ["compositions.base", "the student itself"]),
    # methods: their names, and what each of them needs
    (
        "compositions.both.method=onlin",
        [
            'compositions.both.method = "onlin": must be',
            "'joint', 'mixture', 'online', 'sequential', 'teacher' or 'self'",
        ],
    ),
    ("compositions.both.method=3", ["compositions.both.method = 3: must be 'joint'"]),
    ("compositions.both=3", ["compositions.both = 3: must be a table"]),
    ("compositions.joint={weights={acc=0.7}}", ["compositions.joint.weights = ", "sum to 1"]),
    ("compositions.both.method=sequential", ["compositions.both.sequence is missing", "anchors in their order"]),
    (
        "compositions.x={method='sequential', weights={acc=0.5, brief=0.5}, sequence=['acc']}",
        ['compositions.x.sequence = ["acc"]', "sequence must name every anchor with a weight once: acc, brief"],
    ),
    (
        "compositions.x={method='sequential', weights={acc=1.0, brief=0.0}, sequence=['acc', 'acc']}",
        ["sequence must name every anchor with a weight once: acc"],
    ),
    ("compositions.x={method='sequential', weights={acc=1.0}, sequence=[]}", ["sequence must name every anchor"]),
    ("compositions.both.method=teacher", ["compositions.both.weights", "teacher aims at one anchor"]),
    ("compositions.x.method=self", ["compositions.x.sharpen is missing", "sharpen = 0.6"]),
    ("compositions.x={method='self', sharpen=0.0}", ["compositions.x.sharpen = 0.0", "greater than 0"]),
    (
        "compositions.x={method='mixture', weights={acc=1.5, brief=-0.5}, allow_negative=true}",
        ["compositions.x.weights", "negative weights are not supported by mixture training"],
    ),
    (
        "compositions.x={method='teacher', weights={acc=-1.0}, normalize=false, allow_negative=true}",
        ["negative weights are not supported by teacher training"],
    ),
    (
        "compositions.x={method='sequential', weights={acc=1.5, brief=-0.5}, allow_negative=true, sequence=['acc']}",
        ["negative weights are not supported by sequential training"],
    ),
    (
        "compositions.x={method='online', weights={acc=1.5, brief=-0.5}}",
        ["allow_negative = true allows a weight to subtract"],
    ),
    # keys of another method
    (
        "compositions.x={method='online', weights={acc=1.0}, kl_budget=0.1}",
        ['compositions.x.kl_budget = 0.1: method = "online" has no kl_budget, only "joint" and "mixture": set alpha'],
    ),
    (
        "compositions.x={method='self', sharpen=0.5, weights={acc=1.0}}",
        ['compositions.x.weights = {"acc": 1.0}: method = "self" has no weights', "remove it"],
    ),
    (
        "compositions.x={method='online', weights={acc=1.0}, dose='full'}",
        ['compositions.x.dose = "full": method = "online" has no dose, only "sequential": remove it'],
    ),
    ("compositions.both.dose='matched'", ['compositions.both.dose = "matched": add method = "sequential"']),
    ("compositions.both.resample=false", ['compositions.both.resample = false: add method = "sequential"']),
    ("compositions.both.sequense=['acc']", ["Did you mean compositions.both.sequence?"]),
    ("compositions.both.methd='online'", ["Did you mean compositions.both.method?"]),
    ("compositions.x.wieghts={acc=1.0}", ["Did you mean compositions.x.weights?"]),
    (
        "compositions.both.sequence=['acc', 'brief']",
        ['compositions.both.sequence = ["acc", "brief"]: add method = "sequential"'],
    ),
    ("compositions.x.sharpen=0.5", ['compositions.x.sharpen = 0.5: add method = "self"']),
    ("compositions.both.sharpen=0.5", ['compositions.both.sharpen = 0.5: add method = "self"']),
    # keys of earlier recipes, with what to write
    ("anchors.acc.post_url='http://a:1'", ['write anchors.acc.engine = { post = "http://a:1" }, or one URL']),
    ("anchors.acc.pre_url='http://a:1'", ['write anchors.acc.engine = { pre = "http://a:1" }, or one URL']),
    ("anchors.acc.shift_clip=5.0", ["anchors.acc.shift_clip = 5.0: write anchors.acc.shift.clip = 5.0"]),
    ("anchors.acc.temperature=0.5", ["write anchors.acc.shift.temperature = 0.5"]),
    ("train.validate_every=10", ["train.validate_every = 10: write train.checkpoint_every = 10"]),
    ("train.keep=3", ["train.keep = 3: remove it: the newest 2 checkpoints are kept"]),
    ("score.dtype='float32'", ['write engine.dtype = "float32", or', 'engine.dtype = { score = "float32" }']),
    ("rollout.parity=0.1", ["write engine.parity = 0.1"]),
    ("harness.chat=false", ["write harness.args.apply_chat_template = false"]),
    ("report.megabytes=4.0", ["report.megabytes = 4.0: remove it: what the loom shows is fixed"]),
    ("report.cases.x={wrong=['base'], end=9}", ["report.cases.x.end = 9: remove it"]),
    ("checks.right_stop=0.1", ['checks.right_stop = 0.1: write checks.right = 0.1, or "warn" where it was false']),
    ("checks.kl_rise_warn=2.0", ["remove it: it is fixed; checks.kl_rise = false"]),
    ("checks.separation_stop=0.3", ["write checks.swapped = 0.3"]),
    ("checks.empty_stop=0.9", ["checks.unanswered is also for empty responses"]),
    ("checks.longer_stop=0.9", ["checks.swapped = false switches it off"]),
    # what --set itself can get wrong
    ("train.epochs", ["--set train.epochs", "key=value"]),
    ("=3", ["--set =3", "key=value"]),
    ("train..epochs=3", ["train..epochs", "not a dotted key"]),
]


@pytest.mark.parametrize("old", MOVED)
def test_a_key_that_has_moved_is_answered_with_what_to_write(old: str) -> None:
    """The new key is named with the value that was written, and exists."""
    new = MOVED[old].replace("NAME", "acc").replace("VALUE", "0.25")
    *path, last = old.replace("NAME", "acc").split(".")
    data: dict = {"name": "x", "student": {"model": "s"}}
    table = data
    for part in path:
        table = table.setdefault(part, {})
    table[last] = 0.25
    if path[0] == "anchors":
        table |= {"post": "a", "pre": "b"}
    with pytest.raises(InputError) as raised:
        check_recipe(data)
    message = str(raised.value)
    assert f"{'.'.join([*path, last])} = 0.25: " in message, message
    assert "NAME" not in message
    if " " in new:
        assert new in message
    else:
        assert f"write {new} = 0.25" in message
        known = {key.name.replace("NAME", "acc") for key in recipe_keys()}
        assert any(new == key or new.startswith(f"{key}.") for key in known), "the new key exists"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.toml"
    path.write_text(GOOD)
    return path


def test_the_good_recipe_is_good(good: Path) -> None:
    recipe = load_recipe([good])
    assert recipe.compositions["both"].alpha == 2.0
    assert (recipe.rollout.seed, recipe.train.seed, recipe.train.learning_rate) == (42, 1234, 1e-6)


@pytest.mark.parametrize(("override", "parts"), WRONG, ids=[case[0] for case in WRONG])
def test_wrong_value_is_named_with_what_is_allowed(good: Path, override: str, parts: list[str]) -> None:
    with pytest.raises(InputError) as raised:
        load_recipe([good], [override])
    message = str(raised.value)
    assert all(part in message for part in parts), message
    assert message.count("\n") <= 1
    assert not any(f".{method}." in message.replace("compositions.joint.", "") for method in METHODS), "a pydantic tag"


def test_evaluation_during_training_needs_a_benchmark(good: Path) -> None:
    with pytest.raises(InputError, match=r"train.eval_every .* eval.benchmarks, which is empty"):
        load_recipe([good], ["eval.benchmarks=[]", "train.eval_every=5"])


WRONG_FILES = [
    ("[student\nmodel = 'x'", ["broken TOML", "line 1"]),
    ("name = 'x'\nname = 'y'", ["broken TOML", "line 2"]),
    ("name = 'x'\n[student]\nmodel = unquoted", ["broken TOML", "line 3"]),
    ("[student]\nmodel = 'x'", ["name is missing"]),
    ("name = 'x'", ["student is missing"]),
    ("name = 'x'\n[student]\nmodel = ''", ["student.model", "at least 1 character"]),
    ("name = 'x'\n[student]\nmodel = 'm'\n[anchors.a]\npre = 'p'", ["anchors.a", "post is missing, the specialist"]),
    (
        "name = 'x'\nprompts.chat = false\nstudent.model = 'm'\nanchors.a = { model = 'p', post_prompt.system = 's' }",
        ["anchors.a: system needs a chat template", "Use prefix"],
    ),
    (
        "name = 'x'\nstudent.model = 'm'\nanchors.a = { post = 'q', pre = 'p' }\ntags.rules = { math = '1' }\n"
        "compositions.c.weights = { mth = { a = 1.0 }, default = { a = 1.0 } }",
        ["compositions.c.weights.mth", "no rule of [tags.rules] gives this tag; known: math, and default"],
    ),
    ("", ["name is missing", "(also wrong or missing: student)"]),
]


@pytest.mark.parametrize(("text", "parts"), WRONG_FILES)
def test_wrong_file_is_named(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(InputError) as raised:
        load_recipe([path])
    assert all(part in str(raised.value) for part in [str(path), *parts]), raised.value


def test_missing_binary_and_directory_are_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, word in ((tmp_path / "no.toml", "no such recipe"), (tmp_path, "is a directory"), (binary, "not UTF-8")):
        with pytest.raises(InputError, match=word):
            load_recipe([path])


def test_the_program_answers_with_exit_code_2_and_without_torch(good: Path) -> None:
    code = (
        "import sys; sys.argv = ['lweave', 'status', *sys.argv[1:]]\n"
        "from lightning_weave.cli import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(good), "--set", "train.epochs=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"lweave: {good}: train.epochs = 0: must be greater than or equal to 1\n"
    assert done.stdout == ""


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; sys.argv = ['lweave', '--help']\nfrom lightning_weave.cli import main\n"
        "try: main()\nfinally: assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
