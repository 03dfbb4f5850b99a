"""Against PyTorch's own allocator: every request and every free of whole programs, in the same order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fakegpu

SAME = (
    "mlp_sgd", "mlp_dropout_adam", "lenet_momentum", "resnet18_momentum", "vgg_like", "mobilenet_like", "feature_pyramid",
    "convolutional_autoencoder", "variational_autoencoder", "siamese_contrastive", "super_resolution", "half_inference",
    "hooks_everywhere", "loader_with_pinning", "emptied_cache_in_the_loop", "losses_kept_with_graphs", "packed_activations",
    "checkpoint_in_segments", "custom_function", "moving_average_copy", "two_groups_one_frozen",
    "varying_batch_sizes", "actor_critic", "cycles_until_collected",
)  # fmt: skip
"""Not among them: programs whose cycles the collector frees when it likes (`per_sample_gradients`)."""
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    machine = tmp_path_factory.mktemp("machine") / "gpu"
    env = {**os.environ, "FAKEGPU_TOTAL_MB": "81920", "FAKEGPU_CC": "8.0", "FAKEGPU_SHM": str(machine)}
    command = [sys.executable, str(HERE / "both_sides.py"), *SAME]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", SAME)
def test_requests_and_frees_come_in_the_same_order(found, name):
    one = found[name]
    assert one["agree"] == one["measured"] == one["predicted"], one["then"]
