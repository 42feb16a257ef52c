"""Slow and obvious: a step of StableAdamW (Wortsman et al., 2023) for one tensor, as lists of numbers."""


def step(weights, gradient, means, squares, *, number, rate, decay, betas, eps):
    """Weights, means and mean squares after step `number`, the first of which is 1.

    As in the paper, the betas are smaller in the first steps, so the means have no bias.
    """
    beta1, beta2 = (beta * (1 - beta ** (number - 1)) / (1 - beta**number) for beta in betas)
    means = [beta1 * mean + (1 - beta1) * g for mean, g in zip(means, gradient, strict=True)]
    squares = [beta2 * square + (1 - beta2) * g * g for square, g in zip(squares, gradient, strict=True)]
    lags = [g * g / max(square, eps * eps) for g, square in zip(gradient, squares, strict=True)]
    rate /= max(1, (sum(lags) / len(lags)) ** 0.5)
    weights = [
        weight - rate * decay * weight - rate * mean / (square**0.5 + eps)
        for weight, mean, square in zip(weights, means, squares, strict=True)
    ]
    return weights, means, squares
