"""Slow and obvious: a step of each optimizer, for one tensor as lists of numbers, or for one matrix in float64."""

from math import hypot


def means_after(means, numbers, beta):
    return [beta * mean + (1 - beta) * number for mean, number in zip(means, numbers, strict=True)]


def lamb(weights, gradient, means, squares, *, number, rate, decay, betas, eps):
    """LAMB (You et al., 2020): weights, means and mean squares after step `number`, the first of which is 1."""
    means, squares = means_after(means, gradient, betas[0]), means_after(squares, [g * g for g in gradient], betas[1])
    update = []
    for weight, mean, square in zip(weights, means, squares, strict=True):
        root = (square / (1 - betas[1] ** number)) ** 0.5
        update.append(mean / (1 - betas[0] ** number) / (root + eps) + decay * weight)
    if decay > 0 and hypot(*weights) > 0 and hypot(*update) > 0:
        rate *= hypot(*weights) / hypot(*update)
    return [weight - rate * part for weight, part in zip(weights, update, strict=True)], means, squares


def stable(weights, gradient, means, squares, *, number, rate, decay, betas, eps):
    """StableAdamW (Wortsman et al., 2023), where betas are smaller in the first steps, so the means have no bias."""
    betas = [beta * (1 - beta ** (number - 1)) / (1 - beta**number) for beta in betas]
    means, squares = means_after(means, gradient, betas[0]), means_after(squares, [g * g for g in gradient], betas[1])
    lags = [g * g / max(square, eps * eps) for g, square in zip(gradient, squares, strict=True)]
    rate /= max(1, (sum(lags) / len(lags)) ** 0.5)
    weights = [
        weight - rate * decay * weight - rate * mean / (square**0.5 + eps)
        for weight, mean, square in zip(weights, means, squares, strict=True)
    ]
    return weights, means, squares


def orthogonal(matrix):
    """Five Newton–Schulz iterations that bring the singular values of a matrix near 1."""
    x = matrix.double()
    x = x / max(x.norm().item(), 1e-7)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
    return x


def muon(matrix, gradient, momentum, *, rate, decay, mean):
    """Muon (Jordan et al., 2024): the matrix and its momentum. rate, decay: of weights; mean: of gradients."""
    momentum = mean * momentum + (1 - mean) * gradient.double()
    nesterov = mean * momentum + (1 - mean) * gradient.double()
    size = 0.2 * max(matrix.shape) ** 0.5
    return (1 - rate * decay) * matrix.double() - rate * size * orthogonal(nesterov), momentum
