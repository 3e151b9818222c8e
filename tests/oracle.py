"""Every equation again, slowly: plain loops in float64 over a whole vocabulary, straight from the paper.

Lists of floats in, lists of floats out. `_V` runs over the vocabulary, `_O` over candidates plus `other`.
"""

import math
from collections.abc import Callable, Sequence

Vector = Sequence[float]

RESIDUAL_FLOOR = 1e-8
ARGUMENT_FLOOR = 1e-30


def log(x: float) -> float:
    """Take a logarithm with the paper's floor under its argument."""
    return math.log(max(x, ARGUMENT_FLOOR))


def softmax(logits: Vector) -> list[float]:
    top = max(logits)
    unnormalised = [math.exp(logit - top) for logit in logits]
    total = math.fsum(unnormalised)
    return [u / total for u in unnormalised]


def policy_shift(post_V: Vector, pre_V: Vector) -> list[float]:
    """policy-shift, from probabilities."""
    return [math.log(post / pre) for post, pre in zip(post_V, pre_V, strict=True)]


def compose(shifts_KV: Sequence[Vector], weights_K: Vector) -> list[float]:
    """composed-shift."""
    composed = []
    for a in range(len(shifts_KV[0])):
        total = 0.0
        for weight, shift in zip(weights_K, shifts_KV, strict=True):
            if weight != 0:
                total += weight * shift[a]
        composed.append(total)
    return composed


def composed_validity(valid_K: Sequence[bool], weights_K: Vector) -> bool:
    """Intersect the masks of the anchors that take part."""
    return all(valid for valid, weight in zip(valid_K, weights_K, strict=True) if weight != 0)


def partition(b_V: Vector, r_V: Vector, alpha: float) -> float:
    """app-partition-function."""
    return math.fsum(b * math.exp(r / alpha) for b, r in zip(b_V, r_V, strict=True))


def tilt(b_V: Vector, r_V: Vector, alpha: float) -> list[float]:
    """tilted-target, maps-target, app-general-tilt."""
    z = partition(b_V, r_V, alpha)
    return [b * math.exp(r / alpha) / z for b, r in zip(b_V, r_V, strict=True)]


def product_of_ratios(
    b_V: Vector, posts_KV: Sequence[Vector], pres_KV: Sequence[Vector], weights_K: Vector, alpha: float
) -> list[float]:
    """app-multi-anchor-product: the same target without a logarithm of a shift."""
    unnormalised = []
    for a, b in enumerate(b_V):
        for post, pre, weight in zip(posts_KV, pres_KV, weights_K, strict=True):
            b *= (post[a] / pre[a]) ** (weight / alpha)
        unnormalised.append(b)
    total = math.fsum(unnormalised)
    return [u / total for u in unnormalised]


def kl(p_V: Vector, q_V: Vector) -> float:
    total = 0.0
    for p, q in zip(p_V, q_V, strict=True):
        if p > 0:  # 0 log 0 = 0
            total += p * math.log(p / q)
    return total


def total_variation(p_V: Vector, q_V: Vector) -> float:
    return 0.5 * math.fsum(abs(p - q) for p, q in zip(p_V, q_V, strict=True))


def expected(p_V: Vector, r_V: Vector) -> float:
    return math.fsum(p * r for p, r in zip(p_V, r_V, strict=True))


def local_objective(p_V: Vector, r_V: Vector, b_V: Vector, alpha: float) -> float:
    """app-local-objective."""
    return expected(p_V, r_V) - alpha * kl(p_V, b_V)


def covariance(b_V: Vector, u_V: Vector, v_V: Vector) -> float:
    mean_u, mean_v = expected(b_V, u_V), expected(b_V, v_V)
    return math.fsum(b * (u - mean_u) * (v - mean_v) for b, u, v in zip(b_V, u_V, v_V, strict=True))


def bucket(p_V: Vector, candidates: Sequence[int]) -> list[float]:
    """Keep the candidates' probabilities and put the rest into `other`, floored."""
    chosen = set(candidates)
    other = math.fsum(p for a, p in enumerate(p_V) if a not in chosen)
    return [p_V[a] for a in candidates] + [max(other, RESIDUAL_FLOOR)]


def finite_target(b_V: Vector, candidates: Sequence[int], r_C: Vector, alpha: float) -> list[float]:
    """finite-candidate-target; the residual is floored in the behaviour and in the target."""
    q_O = tilt(bucket(b_V, candidates), [*r_C, 0.0], alpha)
    return [*q_O[:-1], max(q_O[-1], RESIDUAL_FLOOR)]


def log_residual_loss(pi_O: Vector, b_O: Vector, q_O: Vector, alpha: float) -> float:
    """finite-candidate-loss."""
    mass = math.fsum(b_O[:-1])
    squares = [b * (log(pi) - log(q)) ** 2 for pi, b, q in zip(pi_O, b_O, q_O, strict=True)]
    return alpha / (2 * mass) * math.fsum(squares)


def sampled_kl(pi: float, b: float) -> float:
    """The k3 estimator at one sampled token."""
    gap = log(b) - log(pi)
    return math.exp(gap) - 1 - gap


def cached_kl(p_V: Vector, b_V: Vector) -> float:
    """app-cached-sampled-kl: what k3 estimates when the tokens were sampled from the behaviour."""
    return math.fsum(b * sampled_kl(p, b) for p, b in zip(p_V, b_V, strict=True))


def renormalised(p_V: Vector, candidates: Sequence[int]) -> list[float]:
    mass = math.fsum(p_V[a] for a in candidates)
    return [p_V[a] / mass for a in candidates]


def direct_opd_loss(
    p_V: Vector, candidates: Sequence[int], shares_C: Vector, r_C: Vector, sampled: int, b_V: Vector, alpha: float
) -> float:
    """naive-offline-dopd, negated, with the shares frozen at `shares_C` (`renormalised` of the current student)."""
    push = math.fsum(s * r * log(p_V[a]) for s, r, a in zip(shares_C, r_C, candidates, strict=True))
    return alpha * sampled_kl(p_V[sampled], b_V[sampled]) - push


def gradient(function: Callable[[list[float]], float], at: Vector, step: float = 1e-5) -> list[float]:
    """Differentiate by central differences, fourth order."""
    slopes = []
    for i in range(len(at)):

        def moved(by: float, i: int = i) -> float:
            point = list(at)
            point[i] += by
            return function(point)

        near, far = moved(step) - moved(-step), moved(2 * step) - moved(-2 * step)
        slopes.append((8 * near - far) / (12 * step))
    return slopes


def aes(acc: float, tokens: float, base_acc: float, base_tokens: float) -> float:
    """aes, one benchmark."""
    delta_l = (base_tokens - tokens) / base_tokens
    delta_a = (acc - base_acc) / base_acc
    if delta_a >= 0:
        return delta_l + 3 * abs(delta_a)
    return delta_l - 5 * abs(delta_a)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Keep what nothing else beats, by comparing everything with everything."""
    kept = []
    for i, (acc, tokens) in enumerate(points):
        beaten = False
        for other_acc, other_tokens in points:
            no_worse = other_acc >= acc and other_tokens <= tokens
            better = other_acc > acc or other_tokens < tokens
            beaten = beaten or (no_worse and better)
        if not beaten:
            kept.append(i)
    return kept
