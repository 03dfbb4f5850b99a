"""Whole programs, in which every request and every free comes in the same order, of the same block.

Not among them: those whose cycles the collector frees when it likes (`per_sample_gradients`).
"""

from __future__ import annotations

from benchmarks.programs import PROGRAMS
from kernel_calls import Setup

NAMES = (
    "mlp_sgd", "mlp_dropout_adam", "lenet_momentum", "resnet18_momentum", "vgg_like", "mobilenet_like", "feature_pyramid",
    "convolutional_autoencoder", "variational_autoencoder", "siamese_contrastive", "super_resolution", "half_inference",
    "hooks_everywhere", "loader_with_pinning", "emptied_cache_in_the_loop", "losses_kept_with_graphs", "packed_activations",
    "checkpoint_in_segments", "custom_function", "moving_average_copy", "two_groups_one_frozen",
    "varying_batch_sizes", "actor_critic", "cycles_until_collected",
)  # fmt: skip
CASES: dict[str, Setup] = {name: lambda name=name: PROGRAMS[name] for name in NAMES}
