"""What one step does on any device: where it computes in half precision."""

import torch
from training import QUIET, train

from bertrain.objectives import OBJECTIVES, LossSum, Objective

SEEN = {}


def in_half():
    return torch.is_autocast_enabled("cpu")


class Watching(Objective):
    """Keeps whether autocast was on in each part of a step."""

    def count(self, batch):
        return len(batch.sample_ids)

    def prepare(self, piece):
        SEEN["prepare"] = in_half()
        return piece

    def forward(self, encoder, outputs, piece):
        SEEN["forward"] = in_half()
        outputs.logits.register_hook(lambda gradient: SEEN.update(backward=in_half()))
        return LossSum(outputs.logits.float().square().mean(), torch.tensor(0))


def test_only_the_forward_pass_is_in_autocast(dataset, tmp_path):
    """Neither the backward pass, as torch advises, nor what a teacher computes without gradients."""
    OBJECTIVES["watching"] = Watching
    SEEN.clear()
    options = QUIET | {"objective": "mlm+watching", "precision": "bf16", "steps": 1, "micro_batch_size": 2}
    train(dataset.path, tmp_path / "run", **options)
    assert SEEN == {"prepare": False, "forward": True, "backward": False}
