"""Prompts: read, format, render and filter them, and account for every row."""

from lightning_weave.prompts.build import build_prompts, read_columns, read_prompts
from lightning_weave.prompts.decontaminate import Overlap, Screen
from lightning_weave.prompts.filters import PromptReport
from lightning_weave.prompts.formats import ask, chatml, dapo, in_context, livecodebench, question_answer
from lightning_weave.prompts.guess import guess_columns
from lightning_weave.prompts.render import EXPECTS, Expectation, encode, expected_of, render
from lightning_weave.prompts.sources import read_rows
