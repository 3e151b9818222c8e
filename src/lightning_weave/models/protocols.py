"""What the stages ask of any engine."""

from collections.abc import Sequence
from typing import Protocol

from lightning_weave.types import Request, Response, SamplingSettings


class Sampler(Protocol):
    """Draw responses, in the order of the requests."""

    def sample(self, requests: Sequence[Request], settings: SamplingSettings) -> list[Response]: ...

    def close(self) -> None:
        """Release the model; the sampler cannot be used afterwards."""
