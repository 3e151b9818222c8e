"""`lweave plan --calibration`: the predictions of the cost model beside the paper's own figures, in Markdown."""

from lightning_weave.plan.calibration import calibrate, leave_one_out


def calibration_page() -> str:
    """Write the tables of docs/plan.md."""
    stages = ["| setting | rollout | reference | anchor scoring | training |", "| --- | --- | --- | --- | --- |"]
    totals = ["| setting | offline | online | ratio |", "| --- | --- | --- | --- |"]
    for prediction in leave_one_out():
        hours = prediction.hours
        online = prediction.online
        paper = prediction.setting
        measured = [paper.rollout, paper.reference, paper.score, paper.train]
        predicted = [hours.rollout, hours.reference, sum(hours.score), hours.train]
        stages.append(_row(paper.label, *zip(predicted, measured, strict=True)))
        ratio = online / hours.total, paper.online / paper.total
        totals.append(_row(paper.label, (hours.total, paper.total), (online, paper.online), ratio))
    return "\n".join([*stages, "", *totals, "", *_constants()]) + "\n"


def _row(label: str, *figures: tuple[float, float]) -> str:
    """Write each predicted figure beside the measured one."""
    cells = [f"{predicted:.2f} / {measured:.2f} ({predicted / measured - 1:+.0%})" for predicted, measured in figures]
    return f"| {' | '.join([label, *cells])} |"


def _constants() -> list[str]:
    constants = calibrate()
    rows = {
        "forward pass, fixed time per token": f"{constants.forward_seconds_per_token * 1e6:.1f} µs",
        "forward pass, utilisation of the peak": f"{constants.forward_utilisation:.1%}",
        "training, forward passes per epoch": f"{constants.passes_per_epoch:.2f}",
        "sampling, per token and 10⁹ parameters": f"{constants.sampling_seconds * 1e15:.0f} µs",
        "online, cost relative to the same work offline": f"{constants.online_share:.2f}",
        "online, lost per round": f"{constants.online_seconds_per_round:.0f} GPU seconds",
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return ["| constant, fitted to all four | |", "| --- | --- |", *lines]
