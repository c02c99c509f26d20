"""Encoders of images."""

from __future__ import annotations

import importlib

import torch
from torch import nn
from torch_packages import torchvision

from .parts import (
    BATCH,
    IMAGE,
    LENGTH,
    NO_DROPOUT,
    TEXT,
    WORDS,
    Model,
    classes,
    hugging_face,
    images,
    model,
    texts,
    transformers,
    words,
)


@model("images", *((name.lower(), name) for name in ("ViT", "DeiT", "Beit", "Dinov2")))
def vision(name):
    kind = f"{name}ForImageClassification"
    values = {**IMAGE, "drop_path_rate": 0.0}
    if name == "Beit":
        values |= {"use_relative_position_bias": True, "use_mean_pooling": True}
    module = hugging_face(kind, f"{name}Config", "sdpa", **values)
    return Model(module, (), {"pixel_values": images(), "labels": classes()})


@model("images")
def masked_autoencoder():
    values = {
        **IMAGE,
        "decoder_hidden_size": 8,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 12,
    }
    module = hugging_face("ViTMAEForPreTraining", "ViTMAEConfig", "sdpa", **values)
    noise = torch.rand(BATCH, 4, dtype=torch.float64)
    return Model(module, (), {"pixel_values": images(), "noise": noise})


@model("images", ("", "Swin"), ("2", "Swinv2"))
def swin(name):
    module = hugging_face(
        f"{name}ForImageClassification",
        f"{name}Config",
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=4,
        drop_path_rate=0.0,
        num_labels=5,
        **NO_DROPOUT,
    )
    return Model(module, (), {"pixel_values": images(), "labels": classes()})


@model("images")
def segformer():
    module = hugging_face(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 8],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
        num_labels=5,
        **NO_DROPOUT,
    )
    labels = torch.randint(0, 5, (BATCH, 16, 16))
    labels[0, 0] = 255
    return Model(module, (), {"pixel_values": images(), "labels": labels})


@model("images")
def clip():
    package = transformers()
    text = {**TEXT, "eos_token_id": 2}
    vision = {key: IMAGE[key] for key in IMAGE if "dropout" not in key}
    config = package.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    config._attn_implementation = "sdpa"
    module = package.CLIPModel(config).train().double()
    ids = words()
    ids[:, -1] = 2
    values = {"input_ids": ids, "pixel_values": images(), "attention_mask": torch.ones_like(ids)}
    return Model(module, (), {**values, "return_loss": True})


@model("images")
def siglip():
    package = transformers()
    text = {**TEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    vision = {key: IMAGE[key] for key in IMAGE if "dropout" not in key}
    config = package.SiglipConfig(text_config=text, vision_config=vision)
    config._attn_implementation = "sdpa"
    module = package.SiglipModel(config).train().double()
    values = {"input_ids": words(), "pixel_values": images(), "return_loss": True}
    return Model(module, (), values)


class Detection(nn.Module):
    """Queries that attend to an image; heads for classes and boxes, and a given matching of queries
    and objects."""

    def __init__(self, width=8, queries=3):
        super().__init__()
        self.backbone = nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(torch.randn(16, width))
        self.queries = nn.Embedding(queries, width)
        self.transformer = nn.Transformer(width, 2, 1, 1, 16, 0.0, batch_first=True)
        self.classes = nn.Linear(width, 5)
        self.boxes = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, image, labels, boxes, matching):
        features = self.backbone(image).flatten(2).transpose(1, 2) + self.place
        queries = self.queries.weight.unsqueeze(0).expand(len(image), -1, -1)
        hidden = self.transformer(features, queries)
        scores, predicted = self.classes(hidden), self.boxes(hidden).sigmoid()
        rows = torch.arange(len(image)).unsqueeze(1)
        wanted = torch.full(scores.shape[:2], 4)
        wanted[rows, matching] = labels
        weights = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.1], dtype=scores.dtype)
        loss = nn.functional.cross_entropy(scores.transpose(1, 2), wanted, weights)
        chosen = predicted[rows, matching]
        corners = [
            torch.cat([box[..., :2] - box[..., 2:] / 2, box[..., :2] + box[..., 2:] / 2], -1)
            for box in (chosen, boxes)
        ]
        return loss + 5 * (chosen - boxes).abs().mean() + 2 * (1 - overlap(*corners)).mean()


def overlap(first: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the generalised intersection over union of boxes."""
    low, high = torch.maximum(first, other), torch.minimum(first, other)
    common = (high[..., 2:] - low[..., :2]).clamp(min=0).prod(-1)
    areas = [(box[..., 2:] - box[..., :2]).clamp(min=0).prod(-1) for box in (first, other)]
    union = areas[0] + areas[1] - common
    hull = (low[..., 2:] - high[..., :2]).prod(-1)
    return common / union - (hull - union) / hull


@model("images")
def detection():
    labels = torch.randint(0, 4, (BATCH, 2))
    boxes = torch.rand(BATCH, 2, 4, dtype=torch.float64) * 0.4 + 0.3
    matching = torch.tensor([[0, 2], [1, 0]])
    return Model(Detection().double(), (images(), labels, boxes, matching))


@model(
    "images",
    *(
        ("vit", "vit_tiny_patch16_224", {"patch_size": 8}),
        ("deit-distilled", "deit_tiny_distilled_patch16_224", {"patch_size": 8}),
        ("cait", "cait_xxs24_224", {"patch_size": 8}),
        ("beit", "beit_base_patch16_224", {"patch_size": 8}),
        ("eva", "eva02_tiny_patch14_224", {"patch_size": 8}),
        ("vit-registers", "vit_base_patch16_siglip_224", {"patch_size": 8, "num_classes": 5}),
    ),
)
def timm(name, values):
    torchvision()
    package = importlib.import_module("timm")
    values = {"embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 5, **values}
    module = package.create_model(name, pretrained=False, img_size=16, **values).train().double()
    options = {"loss": _classification, "targets": (classes(),)}
    return Model(module, (images(),), {}, options)


def _classification(result, target):
    scores = result if isinstance(result, torch.Tensor) else sum(result) / len(result)
    return nn.functional.cross_entropy(scores, target)


@model("images")
def perceiver():
    module = hugging_face(
        "PerceiverForMaskedLM",
        "PerceiverConfig",
        num_latents=4,
        d_latents=16,
        d_model=8,
        num_blocks=1,
        num_self_attends_per_block=1,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
        qk_channels=8,
        v_channels=16,
        attention_probs_dropout_prob=0.0,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
    )
    values = texts()
    values["inputs"] = values.pop("input_ids")
    return Model(module, (), values)
