"""Slow and obvious: a step of Muon (Jordan et al., 2024) for one matrix, in float64."""


def orthogonal(matrix):
    """Five Newton–Schulz iterations that bring the singular values of a matrix near 1."""
    x = matrix.double()
    x = x / max(x.norm().item(), 1e-7)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
    return x


def step(matrix, gradient, momentum, *, rate, decay, mean):
    """The matrix and its momentum after a step. rate: of the step; decay: of weights; mean: of gradients."""
    momentum = mean * momentum + (1 - mean) * gradient.double()
    nesterov = mean * momentum + (1 - mean) * gradient.double()
    size = 0.2 * max(matrix.shape) ** 0.5
    return (1 - rate * decay) * matrix.double() - rate * size * orthogonal(nesterov), momentum
