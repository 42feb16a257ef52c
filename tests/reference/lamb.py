"""Slow and obvious: a step of LAMB (You et al., 2020) for one tensor, as lists of numbers."""


def norm(numbers):
    return sum(number * number for number in numbers) ** 0.5


def step(weights, gradient, means, squares, *, number, rate, decay, betas, eps):
    """Weights, means and mean squares after step `number`, the first of which is 1."""
    beta1, beta2 = betas
    means = [beta1 * mean + (1 - beta1) * g for mean, g in zip(means, gradient, strict=True)]
    squares = [beta2 * square + (1 - beta2) * g * g for square, g in zip(squares, gradient, strict=True)]
    update = []
    for weight, mean, square in zip(weights, means, squares, strict=True):
        root = (square / (1 - beta2**number)) ** 0.5
        update.append(mean / (1 - beta1**number) / (root + eps) + decay * weight)
    if decay > 0 and norm(weights) > 0 and norm(update) > 0:
        rate *= norm(weights) / norm(update)
    return [weight - rate * part for weight, part in zip(weights, update, strict=True)], means, squares
