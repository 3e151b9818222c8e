"""Prompts: read, format, render and filter them, and account for every row."""

from lightning_weave.prompts.build import PromptReport, build_prompts, read_columns, read_prompts
from lightning_weave.prompts.decontaminate import Overlap, Screen
from lightning_weave.prompts.render import (
    CHAT_MODES,
    EFFORT_VARIABLE,
    ChatMode,
    add_context,
    detect_chat_mode,
    encode,
    form_of,
    format_messages,
    livecodebench,
    render,
    render_at_level,
    template_with_levels,
    unmark,
)
from lightning_weave.prompts.sources import guess_columns, read_rows
