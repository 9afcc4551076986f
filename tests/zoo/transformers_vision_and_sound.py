"""Models of images and sound of transformers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from zoo_case import (
    CLASSES,
    HIDDEN,
    LENGTH,
    MOST_RECORDS,
    VOCABULARY,
    Tree,
    case,
    class_loss,
    pixels,
    random_images,
    random_labels,
    random_tokens,
    token_loss,
)

SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


@case("transformers/vit", pixels(), class_loss)
def vit() -> nn.Module:
    config = transformers.ViTConfig(**SIZES, image_size=32, patch_size=8, num_labels=CLASSES)
    return transformers.ViTForImageClassification(config)


@case("transformers/swin", pixels(), class_loss)
def swin() -> nn.Module:
    """Windows are moved into the batch dimension, and stochastic depth draws for each record."""
    config = transformers.SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        num_labels=CLASSES,
    )
    return transformers.SwinForImageClassification(config)


@case("transformers/deit", pixels(), class_loss, held_out=True)
def deit() -> nn.Module:
    config = transformers.DeiTConfig(**SIZES, image_size=32, patch_size=8, num_labels=CLASSES)
    return transformers.DeiTForImageClassification(config)


@case("transformers/convnext_v2", pixels(), class_loss, held_out=True)
def convnext_v2() -> nn.Module:
    """Global response normalisation: a norm over the places of each record."""
    config = transformers.ConvNextV2Config(
        hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, drop_path_rate=0.5, num_labels=CLASSES
    )
    return transformers.ConvNextV2ForImageClassification(config)


@case("transformers/segformer", pixels(), class_loss, held_out=True)
def segformer() -> nn.Module:
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        num_labels=CLASSES,
    )
    return transformers.SegformerForImageClassification(config)


def images_and_texts(generator: torch.Generator) -> tuple[Tree, Tree]:
    ids, mask = random_tokens(generator)
    images = random_images(generator, 3, 16, 16)
    inputs = {"pixel_values": images, "input_ids": ids, "attention_mask": mask}
    return inputs, random_labels(generator)


class ClipClassifier(nn.Module):
    """Classifies an image with its own caption. CLIP's usual loss compares all with all."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.CLIPConfig(
            text_config={
                **SIZES,
                "vocab_size": VOCABULARY,
                "max_position_embeddings": 16,
                "eos_token_id": VOCABULARY - 1,
            },
            vision_config={**SIZES, "image_size": 16, "patch_size": 8},
            projection_dim=8,
        )
        clip = transformers.CLIPModel(config)
        self.text, self.vision = clip.text_model, clip.vision_model
        self.classify = nn.Linear(2 * HIDDEN, CLASSES)

    def forward(self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        text = self.text(input_ids=input_ids, attention_mask=attention_mask).pooler_output
        image = self.vision(pixel_values=pixel_values).pooler_output
        return self.classify(torch.cat([text, image], dim=1))


@case("transformers/clip", images_and_texts, class_loss, held_out=True)
def clip() -> nn.Module:
    return ClipClassifier()


def spectrograms_to_write_down(generator: torch.Generator) -> tuple[Tree, Tree]:
    """20 frames of 8 mel bands, and the text that is spoken."""
    features = random_images(generator, 8, 20)
    text = torch.randint(3, VOCABULARY, (MOST_RECORDS, LENGTH), generator=generator)
    given = F.pad(text[:, :-1], (1, 0), value=1)
    targets = {"tokens": text, "counted": torch.ones_like(text)}
    return {"input_features": features, "decoder_input_ids": given}, targets


@case("transformers/whisper", spectrograms_to_write_down, token_loss)
def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return transformers.WhisperForConditionalGeneration(config)


def sound_waves(generator: torch.Generator) -> tuple[Tree, Tree]:
    return {"input_values": random_images(generator, 400)}, random_labels(generator)


@case("transformers/wav2vec2", sound_waves, class_loss)
def wav2vec2() -> nn.Module:
    """Positions by a convolution with weight normalisation.

    Its masking of spans and its layer drop are off: they draw from NumPy's generator, and from
    PyTorch's once for all records.
    """
    config = transformers.Wav2Vec2Config(
        **SIZES,
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        num_labels=CLASSES,
        apply_spec_augment=False,
        layerdrop=0.0,
    )
    return transformers.Wav2Vec2ForSequenceClassification(config)
