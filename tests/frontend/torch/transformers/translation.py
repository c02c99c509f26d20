"""Encoders with decoders, and encoders of sounds."""

from __future__ import annotations

import torch
from torch import nn

from .parts import (
    BATCH,
    IMAGE,
    REFUSED,
    WORDS,
    Model,
    classes,
    hugging_face,
    model,
    texts,
    words,
)


@model("translation")
def t5():
    """Four names are one tensor."""
    module = hugging_face(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        relative_attention_num_buckets=8,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return Model(module, (), texts())


_TRANSLATION = {
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 16,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "use_cache": False,
}


@model("translation", ("eager", "eager"), ("sdpa", "sdpa"))
def bart(attention):
    module = hugging_face("BartForConditionalGeneration", "BartConfig", attention, **_TRANSLATION)
    return Model(module, (), texts())


@model("translation")
def marian():
    module = hugging_face(
        "MarianMTModel",
        "MarianConfig",
        "sdpa",
        **_TRANSLATION,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return Model(module, (), texts())


@model("translation")
def pegasus():
    module = hugging_face(
        "PegasusForConditionalGeneration", "PegasusConfig", "sdpa", **_TRANSLATION
    )
    return Model(module, (), texts())


@model("sounds")
def whisper():
    values = {key: _TRANSLATION[key] for key in _TRANSLATION if "position" not in key}
    module = hugging_face(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        "sdpa",
        **values,
        num_mel_bins=4,
        max_source_positions=6,
        max_target_positions=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    sounds = torch.randn(BATCH, 4, 12, dtype=torch.float64)
    return Model(module, (), {"input_features": sounds, "labels": words(BATCH, 4)})


def _wav2vec(kind: str) -> nn.Module:
    return hugging_face(
        kind,
        "Wav2Vec2Config",
        "sdpa",
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        conv_dim=[8, 8],
        conv_stride=[3, 2],
        conv_kernel=[4, 3],
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        apply_spec_augment=False,
        num_labels=5,
        classifier_proj_size=8,
    )


@model("sounds")
def wav2vec_classification():
    sounds = torch.randn(BATCH, 60, dtype=torch.float64)
    module = _wav2vec("Wav2Vec2ForSequenceClassification")
    return Model(module, (), {"input_values": sounds, "labels": classes()})


@model("sounds")
def audio_spectrogram():
    values = {key: IMAGE[key] for key in IMAGE if key != "image_size"}
    module = hugging_face(
        "ASTForAudioClassification",
        "ASTConfig",
        "sdpa",
        **{**values, "patch_size": 4},
        num_mel_bins=8,
        max_length=12,
        frequency_stride=4,
        time_stride=4,
    )
    sounds = torch.randn(BATCH, 12, 8, dtype=torch.float64)
    return Model(module, (), {"input_values": sounds, "labels": classes()})


@model("sounds", table=REFUSED)
def wav2vec_ctc():
    sounds = torch.randn(BATCH, 90, dtype=torch.float64)
    return Model(
        _wav2vec("Wav2Vec2ForCTC"),
        (),
        {"input_values": sounds, "labels": words(BATCH, 3)},
        {"line": "labels.max"},
    )
