"""Detection heads with their losses on fixed targets, and segmentation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .parts import Lossy, Sample, index, normal, sample, unit


def _boxes(*shape) -> torch.Tensor:
    """Return boxes by their corners."""
    corner = unit(*shape, 2) * 4
    return torch.cat([corner, corner + 1 + unit(*shape, 2) * 3], -1)


def _areas(boxes: torch.Tensor) -> torch.Tensor:
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def _giou(first: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    low, high = (
        torch.maximum(first[..., :2], other[..., :2]),
        torch.minimum(first[..., 2:], other[..., 2:]),
    )
    shared = (high - low).clamp(min=0).prod(-1)
    union = _areas(first) + _areas(other) - shared
    low, high = (
        torch.minimum(first[..., :2], other[..., :2]),
        torch.maximum(first[..., 2:], other[..., 2:]),
    )
    hull = (high - low).clamp(min=0).prod(-1)
    return shared / union - (hull - union) / hull


def fcos() -> Sample:
    """Return FCOS's head with the focal, the GIoU and the centerness loss."""
    from torchvision.models.detection.fcos import FCOSHead
    from torchvision.ops import sigmoid_focal_loss

    places = torch.stack(
        torch.meshgrid(*[torch.arange(4.0).double()] * 2, indexing="xy"), -1
    ).reshape(-1, 2)

    def loss(outputs, classes, boxes):
        positive = (classes < 3).double()
        hot = F.one_hot(classes, 4)[..., :3].double()
        focal = sigmoid_focal_loss(outputs["cls_logits"], hot, reduction="sum")
        sides = outputs["bbox_regression"]
        predicted = torch.cat([places - sides[..., :2], places + sides[..., 2:]], -1)
        giou = ((1 - _giou(predicted, boxes)) * positive).sum()
        center = F.binary_cross_entropy_with_logits(
            outputs["bbox_ctrness"].squeeze(-1), positive * 0.7, reduction="none"
        )
        return (focal + giou + (center * positive).sum()) / positive.sum().clamp(min=1)

    head = FCOSHead(32, 1, 3, 1)
    return sample(head, [normal(2, 32, 4, 4)], loss=loss, targets=(index(4, 2, 16), _boxes(2, 16)))


def retinanet() -> Sample:
    """Return RetinaNet's head on two levels of a pyramid, with its losses, positives by a mask."""
    from torchvision.models.detection.retinanet import RetinaNetHead
    from torchvision.ops import sigmoid_focal_loss

    def loss(outputs, classes, wanted):
        positive = classes < 3
        hot = F.one_hot(classes, 4)[..., :3].double()
        valid = (classes != 1).double().unsqueeze(-1)
        focal = (sigmoid_focal_loss(outputs["cls_logits"], hot, reduction="none") * valid).sum()
        boxes = F.smooth_l1_loss(outputs["bbox_regression"], wanted, reduction="none", beta=0.1)
        boxes = torch.where(positive.unsqueeze(-1), boxes, 0.0).sum()
        return (focal + boxes) / positive.sum().clamp(min=1)

    head = RetinaNetHead(32, 2, 3)
    features = [normal(2, 32, 4, 4), normal(2, 32, 2, 2)]
    return sample(head, features, loss=loss, targets=(index(4, 2, 40), normal(2, 40, 4)))


def ssd() -> Sample:
    """Return SSD's head with mining of hard negatives by sorting."""
    from torchvision.models.detection.ssd import SSDHead

    def loss(outputs, classes, wanted):
        logits = outputs["cls_logits"]
        positive = classes > 0
        count = positive.sum(1, keepdim=True)
        boxes = F.smooth_l1_loss(outputs["bbox_regression"], wanted, reduction="none").sum(-1)
        losses = F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="none")
        losses = losses.view(classes.shape)
        negative = losses.detach().masked_fill(positive, -float("inf"))
        rank = negative.sort(1, descending=True)[1].sort(1)[1]
        chosen = positive | (rank < 3 * count)
        total = (boxes * positive).sum() + torch.where(chosen, losses, 0.0).sum()
        return total / positive.sum().clamp(min=1)

    features = [normal(2, 8, 4, 4), normal(2, 12, 2, 2)]
    classes = index(4, 2, 40) * (unit(2, 40) < 0.2)
    head = SSDHead([8, 12], [2, 2], 4)
    return sample(head, features, loss=loss, targets=(classes, normal(2, 40, 4)))


def yolo() -> Sample:
    """Return a head with anchors on a small backbone with SiLU and concatenated branches."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(8, 16, 1), nn.Conv2d(24, 8, 1)
            self.inner = nn.Sequential(
                nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(True)
            )

        def forward(self, x):
            parts = list(self.first(x).chunk(2, 1))
            parts.append(parts[-1] + self.inner(parts[-1]))
            return self.second(torch.cat(parts, 1))

    def loss(out, classes, boxes, present):
        n = out.shape[0]
        out = out.view(n, 2, 8, 4, 4).permute(0, 1, 3, 4, 2)
        center, size = out[..., :2].sigmoid() * 2 - 0.5, (out[..., 2:4].sigmoid() * 2) ** 2
        predicted = torch.cat([center - size / 2, center + size / 2], -1)
        giou = _giou(predicted, boxes)
        objectness = present * giou.detach().clamp(0)
        total = F.binary_cross_entropy_with_logits(out[..., 4], objectness)
        total = total + ((1 - giou) * present).sum() / 8
        hot = F.one_hot(classes, 3).double()
        return (
            total
            + (
                F.binary_cross_entropy_with_logits(out[..., 5:], hot, reduction="none").mean(-1)
                * present
            ).sum()
        )

    stem = [nn.Conv2d(3, 8, 6, 2, 2, bias=False), nn.BatchNorm2d(8, 1e-3, 0.03), nn.SiLU(True)]
    pools = [Branches(), nn.MaxPool2d(5, 1, 2), nn.Upsample(scale_factor=2), nn.AvgPool2d(4, 4)]
    module = nn.Sequential(*stem, *pools, nn.Conv2d(8, 16, 1))
    targets = (index(3, 2, 2, 4, 4), _boxes(2, 2, 4, 4), (unit(2, 2, 4, 4) < 0.3).double())
    return sample(module, normal(2, 3, 16, 16), loss=loss, targets=targets)


def center_net() -> Sample:
    """Return a heat map with the penalty-reduced focal loss, and offsets gathered at the
    objects."""

    def loss(outputs, heat, places, offsets):
        logits, regression = outputs
        p = logits.sigmoid().clamp(1e-4, 1 - 1e-4)
        at = heat.eq(1).double()
        positive = (torch.log(p) * (1 - p).pow(2) * at).sum()
        negative = (torch.log(1 - p) * p.pow(2) * (1 - heat).pow(4) * (1 - at)).sum()
        flat = regression.flatten(2).transpose(1, 2)
        predicted = flat.gather(1, places.unsqueeze(-1).expand(-1, -1, 2))
        return -(positive + negative) / at.sum() + F.l1_loss(predicted, offsets)

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.heat, self.offset = (
                nn.Conv2d(3, 8, 3, 2, 1),
                nn.Conv2d(8, 2, 1),
                nn.Conv2d(8, 2, 1),
            )

        def forward(self, x):
            x = F.relu(self.body(x))
            return self.heat(x), self.offset(x)

    heat = unit(2, 2, 8, 8) * 0.9
    heat[:, 0, 2, 3] = heat[:, 1, 5, 5] = 1.0
    return sample(
        Heads(), normal(2, 3, 16, 16), loss=loss, targets=(heat, index(64, 2, 3), normal(2, 3, 2))
    )


class _UNet(nn.Module):
    def __init__(self, bilinear: bool):
        super().__init__()
        self.down, self.middle = self._double(3, 6), self._double(6, 12)
        self.up = nn.ConvTranspose2d(12, 6, 2, 2)
        if bilinear:
            scaled = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            self.up = nn.Sequential(scaled, nn.Conv2d(12, 6, 1))
        self.last, self.head = self._double(12, 6), nn.Conv2d(6, 3, 1)

    def _double(self, i: int, o: int) -> nn.Module:
        layers = [
            (nn.Conv2d(n, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(True))
            for n in (i, o)
        ]
        return nn.Sequential(*layers[0], *layers[1])

    def forward(self, x):
        high = self.down(x)
        up = self.up(self.middle(F.max_pool2d(high, 2)))
        rows, columns = high.shape[2] - up.shape[2], high.shape[3] - up.shape[3]
        up = F.pad(up, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
        return self.head(self.last(torch.cat([high, up], 1)))


def _dice(logits, y):
    hot = F.one_hot(y, 3).permute(0, 3, 1, 2).double()
    p = logits.softmax(1)
    shared = (p * hot).sum((0, 2, 3))
    return (
        1
        - (2 * shared / (p + hot).sum((0, 2, 3)).clamp_min(1e-6)).mean()
        + F.cross_entropy(logits, y)
    )


def unet() -> Sample:
    return sample(_UNet(False), normal(2, 3, 13, 14), loss=_dice, targets=(index(3, 2, 13, 14),))


def unet_bilinear() -> Sample:
    return sample(_UNet(True), normal(2, 3, 12, 12), loss=_dice, targets=(index(3, 2, 12, 12),))


def _segmentation(head: nn.Module, channels: int, mode: str = "bilinear") -> Sample:
    backbone = nn.Sequential(nn.Conv2d(3, channels, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2))

    def loss(out, y):
        out = F.interpolate(out, y.shape[-2:], mode=mode, align_corners=False)
        return F.cross_entropy(
            out, y, ignore_index=255, weight=torch.tensor([1.0, 2.0, 0.5]).double()
        )

    y = index(3, 2, 15, 17)
    y[:, 3:6] = 255
    return sample(nn.Sequential(backbone, head), normal(2, 3, 32, 32), loss=loss, targets=(y,))


def fcn() -> Sample:
    from torchvision.models.segmentation.fcn import FCNHead

    return _segmentation(FCNHead(16, 3), 16)


def fcn_bicubic() -> Sample:
    from torchvision.models.segmentation.fcn import FCNHead

    return _segmentation(FCNHead(16, 3), 16, "bicubic")


def deeplab() -> Sample:
    from torchvision.models.segmentation.deeplabv3 import ASPP

    return _segmentation(nn.Sequential(ASPP(8, [2, 3], 6), nn.Conv2d(6, 3, 1)), 8)


def lraspp() -> Sample:
    from torchvision.models.segmentation.lraspp import LRASPPHead

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 12, 3, 2, 1)
            self.head = LRASPPHead(8, 12, 3, 6)

        def forward(self, x):
            low = F.hardswish(self.low(x))
            return self.head({"low": low, "high": self.high(low)})

    return sample(Model(), normal(2, 3, 16, 16), loss=F.cross_entropy, targets=(index(3, 2, 8, 8),))


def pyramid() -> Sample:
    from torchvision.ops import FeaturePyramidNetwork
    from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

    module = FeaturePyramidNetwork([4, 6, 8], 6, LastLevelMaxPool())
    features = {"a": normal(2, 4, 9, 9), "b": normal(2, 6, 5, 5), "c": normal(2, 8, 3, 3)}
    return sample(
        module, features, loss=lambda out: sum((output**2).mean() for output in out.values())
    )


def super_resolution() -> Sample:
    layers = [nn.Conv2d(3, 8, 5, padding=2, padding_mode="reflect"), nn.PReLU(8)]
    layers += [
        nn.Conv2d(8, 12, 3, padding=1, padding_mode="replicate"),
        nn.PixelShuffle(2),
        nn.ZeroPad2d(1),
    ]
    module = nn.Sequential(*layers, nn.Conv2d(3, 3, 3))
    return sample(module, normal(2, 3, 8, 8), loss=F.l1_loss, targets=(unit(2, 3, 16, 16),))


def spatial_transformer() -> Sample:
    def loss(self, x, y):
        theta = self.locate(x.flatten(1)).view(-1, 2, 3) + self.identity
        grid = F.affine_grid(theta, x.shape, align_corners=False)
        x = F.grid_sample(x, grid, padding_mode="zeros", align_corners=False)
        return F.cross_entropy(self.head(x).flatten(2).mean(2), y)

    identity = torch.tensor([[1.0, 0, 0], [0, 1, 0]])
    module = Lossy(loss, locate=nn.Linear(64, 6), head=nn.Conv2d(1, 4, 3), identity=identity)
    return sample(module, normal(3, 1, 8, 8), index(4, 3))


DETECTION = {
    "fcos": fcos,
    "retinanet": retinanet,
    "ssd": ssd,
    "yolo": yolo,
    "center_net": center_net,
}

SEGMENTATION = {
    "unet": unet,
    "unet_bilinear": unet_bilinear,
    "fcn": fcn,
    "fcn_bicubic": fcn_bicubic,
    "deeplab": deeplab,
    "lraspp": lraspp,
    "pyramid": pyramid,
    "super_resolution": super_resolution,
    "spatial_transformer": spatial_transformer,
}
