"""Image models of timm."""

from __future__ import annotations

import timm
from timm.layers import GroupNorm1
from timm.models.metaformer import MetaFormer
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock
from torch import nn
from torchvision_models import without_batch_norm
from zoo_case import CLASSES, HIDDEN, case, class_loss, floats

from tacit import make_trainable
from tacit.models import group_norm

IMAGES = floats(3, 32, 32)
VIT = {
    "img_size": 32,
    "patch_size": 8,
    "depth": 2,
    "embed_dim": HIDDEN,
    "num_heads": 2,
    "num_classes": CLASSES,
}
MIXER = {
    "img_size": 32,
    "patch_size": 8,
    "num_blocks": 2,
    "embed_dim": HIDDEN,
    "num_classes": CLASSES,
}


@case("timm/vit_tiny", IMAGES, class_loss)
def vit_tiny() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", **VIT)


@case("timm/beit", IMAGES, class_loss)
def beit() -> nn.Module:
    """Relative positions, a scale on each branch, and biases on queries and values alone."""
    return timm.create_model("beit_base_patch16_224", **VIT)


@case("timm/nf_resnet26", IMAGES, class_loss)
def nf_resnet26() -> nn.Module:
    """No norms: weights are standardised before each convolution."""
    return timm.create_model("nf_resnet26", channels=(16, 16, 32, 32), num_classes=CLASSES)


@case("timm/resmlp", IMAGES, class_loss)
def resmlp() -> nn.Module:
    """Linear layers over the patches of a record; affine maps in the place of norms."""
    return MlpMixer(**MIXER, mlp_ratio=4, block_layer=ResBlock, norm_layer=Affine)


@case("timm/regnet_made_trainable", IMAGES, class_loss, held_out=True, tolerance=1e-4)
def regnet_made_trainable() -> nn.Module:
    """Norms with activations inside, grouped convolutions, squeeze and excitation."""
    model = timm.create_model("regnety_002", num_classes=CLASSES)
    return make_trainable(model, group_norm(4)).model


@case("timm/eva", IMAGES, class_loss, held_out=True)
def eva() -> nn.Module:
    """Rotary positions and gated linear units."""
    return timm.create_model("eva02_tiny_patch14_224", **VIT)


@case("timm/mixer", IMAGES, class_loss, held_out=True)
def mixer() -> nn.Module:
    return MlpMixer(**MIXER)


@case("timm/xcit", IMAGES, class_loss, held_out=True)
def xcit() -> nn.Module:
    """Attention between channels, with a learned temperature for each head."""
    model = timm.create_model("xcit_nano_12_p8_224", **VIT)
    return without_batch_norm(model)


@case("timm/poolformer", IMAGES, class_loss, held_out=True)
def poolformer() -> nn.Module:
    """Pooling instead of attention, and scales on each branch."""
    return MetaFormer(
        depths=(1, 1),
        dims=(8, 16),
        downsample_norm=None,
        mlp_act=nn.GELU,
        mlp_bias=True,
        norm_layers=GroupNorm1,
        layer_scale_init_values=1e-5,
        res_scale_init_values=None,
        use_mlp_head=False,
        num_classes=CLASSES,
    )


@case("timm/edgenext", IMAGES, class_loss, held_out=True)
def edgenext() -> nn.Module:
    """Split depth-wise convolutions, attention between channels, Fourier positions."""
    return timm.create_model(
        "edgenext_xx_small",
        dims=(8, 16, 16, 32),
        depths=(1, 1, 1, 1),
        heads=(2, 2, 2, 2),
        num_classes=CLASSES,
    )


@case("timm/coatnet", IMAGES, class_loss, held_out=True)
def coatnet() -> nn.Module:
    """Convolutions first, attention with relative positions after them."""
    model = timm.create_model(
        "coatnet_pico_rw_224",
        img_size=32,
        embed_dim=(16, 32),
        depths=(1, 1),
        block_type=("C", "T"),
        stem_width=(8, 16),
        transformer_dim_head=8,
        num_classes=CLASSES,
    )
    return without_batch_norm(model)


@case("timm/cait", IMAGES, class_loss, held_out=True)
def cait() -> nn.Module:
    """Talking heads: linear layers that mix the scores of attention heads."""
    return timm.create_model("cait_xxs24_224", **VIT)
