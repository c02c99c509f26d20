"""Convolutional networks of torchvision and timm, with few channels."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from .parts import Sample, classifier


def _head(channels: int, classes: int = 4) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


def resnet() -> Sample:
    """Return a network of a basic block and a bottleneck with groups, dilation and a shortcut."""
    from torchvision.models.resnet import BasicBlock, Bottleneck, conv1x1

    shortcut = nn.Sequential(conv1x1(8, 16, 2), nn.BatchNorm2d(16))
    stem = [nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(True)]
    blocks = [
        nn.MaxPool2d(3, 2, 1),
        BasicBlock(8, 8),
        Bottleneck(8, 4, 2, shortcut, groups=2, base_width=64),
        Bottleneck(16, 4, dilation=2),
    ]
    return classifier(nn.Sequential(*stem, *blocks, *_head(16)))


def resnet18() -> Sample:
    from torchvision.models import ResNet
    from torchvision.models.resnet import BasicBlock

    return classifier(ResNet(BasicBlock, [1, 1, 1, 1], num_classes=4, zero_init_residual=True), 64)


def mobilenet_v2() -> Sample:
    from torchvision.models import MobileNetV2

    setting = [[1, 8, 1, 1], [4, 12, 1, 2], [4, 12, 1, 1]]
    return classifier(MobileNetV2(4, 0.25, setting, dropout=0.0))


def mobilenet_v3() -> Sample:
    from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

    setting = [
        InvertedResidualConfig(8, 3, 16, 8, True, "RE", 1, 1, 1.0),
        InvertedResidualConfig(8, 5, 24, 16, True, "HS", 2, 1, 1.0),
        InvertedResidualConfig(16, 5, 24, 16, False, "HS", 1, 2, 1.0),
    ]
    return classifier(MobileNetV3(setting, 32, 4, dropout=0.0))


def efficientnet() -> Sample:
    from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig

    setting = [
        FusedMBConvConfig(2, 3, 1, 8, 8, 1),
        MBConvConfig(3, 3, 2, 8, 16, 2),
        MBConvConfig(2, 5, 1, 16, 16, 1),
    ]
    return classifier(EfficientNet(setting, 0.0, 0.0, 4, last_channel=24))


def densenet() -> Sample:
    from torchvision.models import DenseNet

    return classifier(DenseNet(4, (2, 2), 8, 2, 0.0, 4))


def densenet_checkpointed() -> Sample:
    """Return a network with checkpointed sections.

    Eager PyTorch runs them twice, and moves running statistics twice; therefore they have none.
    """
    from torchvision.models import DenseNet

    module = DenseNet(4, (3,), 8, 2, 0.0, 4, memory_efficient=True)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean = part.running_var = part.num_batches_tracked = None
    return classifier(module)


def shufflenet() -> Sample:
    from torchvision.models import ShuffleNetV2

    return classifier(ShuffleNetV2([1, 2, 1], [8, 8, 16, 16, 24], 4), 64)


def regnet() -> Sample:
    from torchvision.models.regnet import BlockParams, RegNet

    params = BlockParams([1, 2], [8, 16], [4, 8], [1.0, 1.0], [2, 2], 0.25)
    return classifier(RegNet(params, 4, stem_width=8))


def convnext() -> Sample:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return classifier(ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], 0.0, 0.5, 4))


def vgg() -> Sample:
    from torchvision.models.vgg import make_layers

    features = make_layers([8, "M", 16, 16, "M"], batch_norm=True)
    layers = [
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(144, 16),
        nn.ReLU(True),
        nn.Dropout(),
    ]
    return classifier(nn.Sequential(*features, *layers, nn.Linear(16, 4)))


def squeezenet() -> Sample:
    from torchvision.models.squeezenet import Fire

    pool = partial(nn.MaxPool2d, 3, 2, ceil_mode=True)
    layers = [
        nn.Conv2d(3, 8, 3, 2),
        nn.ReLU(True),
        pool(),
        Fire(8, 4, 8, 8),
        pool(),
        Fire(16, 4, 8, 8),
    ]
    return classifier(
        nn.Sequential(*layers, nn.Conv2d(16, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    )


def googlenet() -> Sample:
    from torchvision.models.googlenet import BasicConv2d, Inception

    layers = [BasicConv2d(3, 8, kernel_size=3, stride=2), nn.MaxPool2d(3, 2, ceil_mode=True)]
    layers += [Inception(8, 4, 4, 8, 2, 4, 4), Inception(20, 4, 4, 4, 2, 4, 4)]
    return classifier(nn.Sequential(*layers, *_head(16)))


class _Auxiliary(nn.Module):
    """Returns the results of two heads, as Inception does in training mode."""

    def __init__(self):
        super().__init__()
        from torchvision.models.inception import (
            BasicConv2d,
            InceptionA,
            InceptionB,
            InceptionC,
            InceptionE,
        )

        self.stem = BasicConv2d(3, 6, kernel_size=3, stride=2)
        self.blocks = nn.Sequential(InceptionA(6, 2), InceptionB(226))
        self.middle = nn.Sequential(
            nn.Conv2d(706, 8, 1), InceptionC(8, 4), nn.Conv2d(768, 8, 1), InceptionE(8)
        )
        self.first, self.last = nn.Linear(8, 4), nn.Linear(2048, 4)

    def forward(self, x):
        x = self.blocks(self.stem(x))
        half = self.middle[0](x)
        x = self.middle[1:](half)
        auxiliary = self.first(half.mean((2, 3)))
        return self.last(x.mean((2, 3))), auxiliary


def inception() -> Sample:
    zoo_sample = classifier(_Auxiliary(), 24)
    cross_entropy = nn.functional.cross_entropy
    zoo_sample.loss = lambda outputs, y: (
        cross_entropy(outputs[0], y) + 0.4 * cross_entropy(outputs[1], y)
    )
    return zoo_sample


def mnasnet() -> Sample:
    from torchvision.models.mnasnet import _InvertedResidual

    layers = [
        nn.Conv2d(3, 8, 3, 2, 1),
        _InvertedResidual(8, 8, 3, 1, 3),
        _InvertedResidual(8, 12, 5, 2, 3),
    ]
    return classifier(nn.Sequential(*layers, *_head(12)))


def video() -> Sample:
    """Return blocks of R(2+1)D for videos."""
    from torchvision.models.video.resnet import BasicBlock, Conv2Plus1D, Conv3DSimple, R2Plus1dStem

    layers = [
        R2Plus1dStem(),
        nn.Conv3d(64, 6, 1),
        BasicBlock(6, 6, Conv2Plus1D),
        BasicBlock(6, 6, Conv3DSimple),
    ]
    zoo_sample = classifier(
        nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(6, 4))
    )
    zoo_sample.args = (torch.randn(2, 3, 3, 12, 12, dtype=torch.float64),)
    zoo_sample.targets = (zoo_sample.targets[0][:2],)
    return zoo_sample


def _timm(name: str, tolerance: float | None = None) -> Sample:
    import timm

    zoo_sample = classifier(timm.create_model(name, num_classes=4), batch=2)
    zoo_sample.options["tolerance"] = tolerance
    return zoo_sample


TIMM = {
    "timm_resnet": partial(_timm, "test_resnet"),
    "timm_efficientnet": partial(
        _timm, "test_efficientnet", 1e-6
    ),  # its first evaluation is near 1e10
    "timm_efficientnet_gn": partial(_timm, "test_efficientnet_gn"),
    "timm_efficientnet_ln": partial(_timm, "test_efficientnet_ln"),
    "timm_efficientnet_evos": partial(
        _timm, "test_efficientnet_evos", 1e-4
    ),  # its variances are float32
    "timm_byobnet": partial(_timm, "test_byobnet"),
    "timm_nfnet": partial(_timm, "test_nfnet"),
    "timm_mambaout": partial(_timm, "test_mambaout"),
    "timm_convnext": partial(_timm, "test_convnext"),
    "timm_convnext2": partial(_timm, "test_convnext2"),
    "timm_convnext3": partial(_timm, "test_convnext3"),
}

VISION = {
    "resnet": resnet,
    "resnet18": resnet18,
    "mobilenet_v2": mobilenet_v2,
    "mobilenet_v3": mobilenet_v3,
    "efficientnet": efficientnet,
    "densenet": densenet,
    "densenet_checkpointed": densenet_checkpointed,
    "shufflenet": shufflenet,
    "regnet": regnet,
    "convnext": convnext,
    "vgg": vgg,
    "squeezenet": squeezenet,
    "googlenet": googlenet,
    "inception": inception,
    "mnasnet": mnasnet,
    "video": video,
    **TIMM,
}
