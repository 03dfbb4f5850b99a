"""Detection of torchvision, in training and alone: what is matched, kept and suppressed depends on values.

Needs the extra `third-party`, built for this PyTorch. Importing this module adds them to `PROGRAMS`. Measured with `--values`.
"""

from __future__ import annotations

from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from benchmarks.programs.registry import program

detection = torchvision.models.detection


def detected(model: nn.Module, extra: Any = None, size: int = 192, count: int = 2) -> None:
    """Two steps on pictures with three boxes each; losses are the model's own."""
    model.cuda().train()
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], 0.01, momentum=0.9)
    for _ in range(2):
        corners = torch.rand(3, 2) * size / 2
        targets = [
            {"boxes": torch.cat([corners, corners + size / 4], 1).cuda(), "labels": torch.tensor([1, 2, 3]).cuda()}
            | (extra(size) if extra else {})
            for _ in range(count)
        ]
        losses = model([torch.rand(3, size, size).cuda() for _ in range(count)], targets)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()


NONE: dict[str, Any] = {"weights": None, "weights_backbone": None}
SMALL = {"min_size": 192, "max_size": 192}


@program
def torchvision_retinanet() -> None:
    detected(detection.retinanet_resnet50_fpn(**NONE, num_classes=5, **SMALL))


@program
def torchvision_faster_rcnn() -> None:
    detected(detection.fasterrcnn_mobilenet_v3_large_fpn(**NONE, num_classes=5, **SMALL))


@program
def torchvision_mask_rcnn() -> None:
    def outlines(size: int) -> dict[str, Tensor]:
        return {"masks": (torch.rand(3, size, size) > 0.5).to(torch.uint8).cuda()}

    detected(detection.maskrcnn_resnet50_fpn(**NONE, num_classes=5, **SMALL), outlines)


@program
def torchvision_keypoint_rcnn() -> None:
    def points(size: int) -> dict[str, Tensor]:
        return {"keypoints": torch.cat([torch.rand(3, 17, 2) * size, torch.ones(3, 17, 1)], 2).cuda()}

    detected(detection.keypointrcnn_resnet50_fpn(**NONE, num_classes=5, **SMALL), points)


@program
def torchvision_fcos() -> None:
    detected(detection.fcos_resnet50_fpn(**NONE, num_classes=5, **SMALL))


@program
def torchvision_ssd() -> None:
    detected(detection.ssdlite320_mobilenet_v3_large(**NONE, num_classes=5), size=320)


@program
def torchvision_detect_only() -> None:
    model = detection.fasterrcnn_resnet50_fpn_v2(**NONE, num_classes=5, **SMALL).cuda().eval()
    with torch.inference_mode():
        model([torch.rand(3, 192, 160).cuda(), torch.rand(3, 128, 192).cuda()])


@program
def torchvision_retinanet_only() -> None:
    model = detection.retinanet_resnet50_fpn(**NONE, num_classes=5, **SMALL, score_thresh=0.009).cuda().eval()
    with torch.inference_mode():
        model([torch.rand(3, 192, 160).cuda(), torch.rand(3, 128, 192).cuda()])
