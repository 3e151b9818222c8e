"""What students are called in tables and on pages."""

from collections.abc import Sequence

from lightning_weave.runs.steps import Steps


def student_names(students: Sequence[Sequence[Steps]]) -> list[str]:
    """Name each student by the last part of its model's name, or the whole where two would be the same."""
    whole = [runs[0].recipe.student.model.rstrip("/") for runs in students]
    short = [name.split("/")[-1] for name in whole]
    names = [one if short.count(one) == 1 else long for one, long in zip(short, whole, strict=True)]
    marks = [f" ({runs[0].recipe.mark})" if runs[0].recipe.mark else "" for runs in students]
    return [name + mark for name, mark in zip(names, marks, strict=True)]
