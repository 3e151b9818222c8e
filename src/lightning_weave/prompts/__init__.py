"""Prompts: read from anywhere, put into a format, rendered for the student, filtered, and every row accounted for."""

from lightning_weave.prompts.build import build_prompts, read_prompts
from lightning_weave.prompts.decontaminate import Overlap, Screen
from lightning_weave.prompts.filters import PromptReport
from lightning_weave.prompts.formats import Format, chatml, dapo, livecodebench, question_answer
from lightning_weave.prompts.render import encode, render
from lightning_weave.prompts.sources import read_rows
