"""The token budget that ranks take when they start again after one of them ran out of memory.

In the middle of a pass the others wait for that rank, and cannot be told to take less. So it leaves a file for the next
start, at which all of them agree. It is the run's: what is too much for one composition is for the others.
"""

from pathlib import Path

from lightning_weave.store import read_json, write_json
from lightning_weave.train.parallel import Ranks

FILE = "token_budget.json"


def leave_budget(run_dir: Path, asked: int, smaller: int) -> None:
    """Write down that the recipe's budget is too large, and what to take in its place."""
    write_json(run_dir / FILE, {"asked": asked, "smaller": smaller})


def agreed_budget(run_dir: Path, asked: int, ranks: Ranks) -> int:
    """Give all ranks the same budget: the recipe's, unless an earlier start wrote down a smaller one."""
    file = run_dir / FILE
    record = read_json(file) if ranks.first and file.exists() else {}
    return ranks.told(int(record["smaller"]) if record.get("asked") == asked else asked)
