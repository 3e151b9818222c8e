"""`lweave plan --calibration`: the predictions of the cost model beside the paper's own figures, in Markdown."""

from lightning_weave.plan.calibration import Prediction, calibrate, leave_one_out


def calibration_page() -> str:
    """Write the tables of docs/plan.md."""
    predictions = leave_one_out()
    return "\n".join([*_stage_lines(predictions), "", *_total_lines(predictions), "", *_constant_lines()]) + "\n"


def _stage_lines(predictions: list[Prediction]) -> list[str]:
    lines = ["| setting | rollout | reference | anchor scoring | training |", "| --- | --- | --- | --- | --- |"]
    for prediction in predictions:
        setting, hours = prediction.setting, prediction.hours
        pairs = [
            (hours.rollout, setting.rollout),
            (hours.reference, setting.reference),
            (sum(hours.score), setting.score),
            (hours.train, setting.train),
        ]
        lines.append(f"| {setting.label} | " + " | ".join(_beside(*pair) for pair in pairs) + " |")
    return lines


def _total_lines(predictions: list[Prediction]) -> list[str]:
    lines = ["| setting | offline | online | ratio |", "| --- | --- | --- | --- |"]
    for prediction in predictions:
        setting, total = prediction.setting, prediction.hours.total
        ratio = _beside(prediction.online / total, setting.online / setting.total)
        cells = [_beside(total, setting.total), _beside(prediction.online, setting.online), ratio]
        lines.append(f"| {setting.label} | " + " | ".join(cells) + " |")
    return lines


def _beside(predicted: float, measured: float) -> str:
    return f"{predicted:.2f} / {measured:.2f} ({predicted / measured - 1:+.0%})"


def _constant_lines() -> list[str]:
    constants = calibrate()
    rows = {
        "forward pass, per token": f"{constants.forward_seconds_per_token * 1e6:.1f} µs",
        "forward pass, share of the peak for what grows with the model": f"{constants.forward_utilisation:.1%}",
        "training, forward passes per epoch": f"{constants.passes_per_epoch:.2f}",
        "sampling, per token and 10⁹ parameters": f"{constants.sampling_seconds * 1e15:.0f} µs",
        "online, share of the same work offline": f"{constants.online_share:.2f}",
        "online, lost per round": f"{constants.online_seconds_per_round:.0f} GPU seconds",
    }
    return [
        "| constant, fitted to all four | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in rows.items()),
    ]
