"""Tasks by name."""


class TaskManager:
    def __init__(self, include_path: str | None) -> None:
        self.all_tasks = ["sums", "words", "breaks"]
