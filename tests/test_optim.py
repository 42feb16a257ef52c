import pytest
import torch

from bertrain import optim
from bertrain.config import Config
from bertrain.optim import learning_rate


def rates(schedule, steps, warmup_steps):
    options = {"peak": 2.0, "steps": steps, "warmup_steps": warmup_steps, "schedule": schedule}
    return [learning_rate(step, **options) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize("warmup", [0, 1, 2, 60])
def test_rate_rises_to_the_peak_then_falls_and_is_never_zero(schedule, steps, warmup):
    found = rates(schedule, steps, min(warmup, steps))
    assert all(0 < rate <= 2.0 for rate in found)
    top = found.index(max(found))
    assert found[: top + 1] == sorted(found[: top + 1])
    assert found[top:] == sorted(found[top:], reverse=True)
    if warmup < steps:
        assert found[warmup] == pytest.approx(2.0)


def test_rates_of_the_first_and_last_step():
    assert rates("linear", 100, 9)[0] == pytest.approx(0.2)
    assert rates("linear", 100, 0)[0] == 2.0
    assert rates("linear", 100, 0)[-1] == pytest.approx(0.02)
    assert rates("cosine", 100, 0)[50] == pytest.approx(1.0)
    assert rates("wsd", 100, 10)[79] == 2.0
    assert rates("wsd", 100, 10)[-1] < 0.06
    assert rates("linear", 1, 0) == [2.0]
    assert rates("linear", 2, 0) == [2.0, 1.0]
    assert rates("linear", 3, 1) == [1.0, 2.0, 1.0]


def test_only_matrices_are_decayed():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    decayed, plain = optim.build(model, Config(data="x", out="y", weight_decay=0.07)).param_groups
    assert decayed["weight_decay"] == 0.07
    assert [p.ndim for p in decayed["params"]] == [2]
    assert plain["weight_decay"] == 0
    assert [p.ndim for p in plain["params"]] == [1, 1, 1]
