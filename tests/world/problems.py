"""Read the problem files of a world back as exercises."""

import json
from pathlib import Path

from tiny_world.task import Exercise


def read_problems(path: Path) -> list[Exercise]:
    return [Exercise.parse(json.loads(line)["problem"]) for line in path.read_text(encoding="utf-8").splitlines()]
