"""Image models of torchvision. Where they have BatchNorm, it is replaced by GroupNorm."""

from __future__ import annotations

import math

from torch import nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.efficientnet import EfficientNet, MBConvConfig
from torchvision.models.regnet import BlockParams
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2
from zoo_case import CLASSES, HIDDEN, case, class_loss, floats

IMAGES = floats(3, 32, 32)


def group_norm(channels: int, **_: object) -> nn.GroupNorm:
    """Four groups, or as many as divide the channels."""
    return nn.GroupNorm(math.gcd(4, channels), channels)


def without_batch_norm(model: nn.Module) -> nn.Module:
    """The model with GroupNorm in the place of every BatchNorm."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, group_norm(child.num_features))
    return model


@case("torchvision/resnet18", IMAGES, class_loss)
def resnet18() -> nn.Module:
    return models.resnet18(num_classes=CLASSES, norm_layer=group_norm)


@case("torchvision/convnext", IMAGES, class_loss)
def convnext() -> nn.Module:
    """Stochastic depth: one draw for each record and block."""
    blocks = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)]
    return models.ConvNeXt(blocks, stochastic_depth_prob=0.2, num_classes=CLASSES)


@case("torchvision/vit", IMAGES, class_loss)
def vit() -> nn.Module:
    return models.VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=HIDDEN,
        mlp_dim=32,
        dropout=0.1,
        num_classes=CLASSES,
    )


SWIN = {
    "patch_size": [4, 4],
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "window_size": [2, 2],
    "num_classes": CLASSES,
}


@case("torchvision/swin", IMAGES, class_loss)
def swin() -> nn.Module:
    return models.SwinTransformer(**SWIN)


@case("torchvision/swin_v2", IMAGES, class_loss)
def swin_v2() -> nn.Module:
    """Scaled cosine attention; relative positions come from a small network."""
    return models.SwinTransformer(
        **SWIN, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2
    )


@case("torchvision/mobilenet_v3_small", IMAGES, class_loss)
def mobilenet_v3_small() -> nn.Module:
    return models.mobilenet_v3_small(num_classes=CLASSES, norm_layer=group_norm, width_mult=0.25)


@case("torchvision/efficientnet", IMAGES, class_loss)
def efficientnet() -> nn.Module:
    blocks = [MBConvConfig(2, 3, 2, 8, 8, 1), MBConvConfig(4, 5, 2, 8, 16, 1)]
    return EfficientNet(blocks, dropout=0.1, num_classes=CLASSES, norm_layer=group_norm)


@case("torchvision/densenet", IMAGES, class_loss, held_out=True)
def densenet() -> nn.Module:
    """Every layer reads the outputs of all layers before it."""
    model = models.DenseNet(
        growth_rate=4, block_config=(2, 2), num_init_features=8, bn_size=2, num_classes=CLASSES
    )
    return without_batch_norm(model)


@case("torchvision/shufflenet_v2", IMAGES, class_loss, held_out=True)
def shufflenet_v2() -> nn.Module:
    """Channels are split, convolved and shuffled."""
    model = models.ShuffleNetV2([1, 2, 1], [8, 16, 16, 32, 32], num_classes=CLASSES)
    return without_batch_norm(model)


@case("torchvision/regnet", IMAGES, class_loss, held_out=True)
def regnet() -> nn.Module:
    """Grouped convolutions, and channels weighted by a small network."""
    blocks = BlockParams([1, 1], [8, 16], [4, 4], [2, 2], [2, 2], se_ratio=0.25)
    return models.RegNet(blocks, num_classes=CLASSES, stem_width=8, norm_layer=group_norm)


@case("torchvision/squeezenet", IMAGES, class_loss, held_out=True)
def squeezenet() -> nn.Module:
    """Convolutions alone: its head is one, too."""
    return models.squeezenet1_1(num_classes=CLASSES)


@case("torchvision/maxvit", IMAGES, class_loss, held_out=True)
def maxvit() -> nn.Module:
    """Windows and grids in turn, with a table of relative positions for each."""
    model = models.MaxVit(
        input_size=(32, 32),
        stem_channels=8,
        partition_size=4,
        block_channels=[8, 8],
        block_layers=[1, 1],
        head_dim=4,
        stochastic_depth_prob=0.5,
        num_classes=CLASSES,
    )
    return without_batch_norm(model)
