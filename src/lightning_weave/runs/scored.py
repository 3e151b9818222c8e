"""One side of an anchor, as it is scored."""

from dataclasses import dataclass, replace
from typing import Literal

from lightning_weave.config import PromptContext
from lightning_weave.models.checkpoint import Checkpoint

Role = Literal["post", "pre"]
ROLES: tuple[Role, Role] = ("post", "pre")


@dataclass(frozen=True)
class ScoredModel:
    """One side of an anchor: a checkpoint in a context. Scored once however many pairs share it."""

    checkpoint: Checkpoint
    aliases: tuple[tuple[str, str], ...]
    checks_aliases: bool  # a pre-anchor: an alias may lead to a row that it never trained
    untrained: Literal["keep", "mask"] | None  # of a pre-anchor with aliases; None elsewhere
    bos: bool
    prompt: Literal["student", "native"]
    template: Checkpoint | None  # whose chat template both models of a pair read natively: the post-anchor's
    context: PromptContext  # empty: the prompt as it is
    masks_missing: bool  # a row without a column that the context names is masked, not refused
    engine: str | None = None  # of its own; None: that of [score]
    options: tuple[tuple[str, bool | int | float | str], ...] = ()
    url: str | None = None  # of a server that runs it

    @property
    def text(self) -> str:
        """What distinguishes two scored models of one name. Folders of existing runs are named by it: keep it."""
        template = None if self.template is None else (self.template.name, self.template.revision)
        context = f", context={self.context}, masks_missing={self.masks_missing}" if self.context else ""
        engine = f", engine={self.engine}, quantization={dict(self.options).get('quantization')}" if self.engine else ""
        server = ", server" if self.url else ""
        return (
            f"ScoredModel(model={self.checkpoint.name!r}, revision={self.checkpoint.revision!r}, "
            f"trust_remote_code={self.checkpoint.trust_remote_code!r}, aliases={self.aliases!r}, "
            f"checks_aliases={self.checks_aliases!r}, untrained={self.untrained!r}, bos={self.bos!r}, "
            f"prompt={self.prompt!r}, template={template!r}{context}{engine}{server})"
        )

    @property
    def reads_own_prompts(self) -> bool:
        """Whether it reads something else where the student reads its prompt."""
        return self.prompt == "native" or bool(self.context)

    def without_own_prompts(self) -> "ScoredModel":
        """The same checkpoint after the student's prompts: what can be aligned before there are any."""
        return replace(self, prompt="student", template=None, context=PromptContext(), masks_missing=False)
