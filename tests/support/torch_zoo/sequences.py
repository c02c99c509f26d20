"""Recurrent networks and convolutions of sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .parts import Lossy, Sample, index, normal, sample


def lstm() -> Sample:
    """Return a classifier by two bidirectional layers with projections."""

    def loss(self, tokens, y):
        out, (hidden, cell) = self.rnn(self.embedding(tokens))
        return F.cross_entropy(self.head(out.mean(1)), y) + (hidden**2).mean() + cell.mean()

    rnn = nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True, proj_size=5, dropout=0.0)
    module = Lossy(
        loss, embedding=nn.Embedding(11, 6, padding_idx=0), rnn=rnn, head=nn.Linear(10, 4)
    )
    return sample(module, index(11, 3, 5), index(4, 3))


def gru_packed() -> Sample:
    """Return a tagger with packed sequences of known lengths."""

    def loss(self, tokens, y):
        packed = pack_padded_sequence(self.embedding(tokens), [5, 4, 2], batch_first=True)
        out, hidden = self.rnn(packed)
        out, _ = pad_packed_sequence(out, batch_first=True)
        return F.cross_entropy(self.head(out).transpose(1, 2), y, ignore_index=-100) + hidden.mean()

    y = index(4, 3, 5)
    y[1, 4:] = y[2, 2:] = -100
    rnn = nn.GRU(6, 7, 2, batch_first=True, bidirectional=True)
    module = Lossy(loss, embedding=nn.Embedding(11, 6), rnn=rnn, head=nn.Linear(14, 4))
    return sample(module, index(11, 3, 5), y)


def gru_masked() -> Sample:
    """Return a network that takes the last valid state by a mask of the lengths."""

    def loss(self, x, lengths, y):
        out, _ = self.rnn(x)
        mask = torch.arange(x.shape[1]) < lengths.unsqueeze(1)
        mean = (out * mask.unsqueeze(-1)).sum(1) / lengths.unsqueeze(1)
        last = out[torch.arange(x.shape[0]), lengths - 1]
        return F.cross_entropy(self.head(mean + last), y)

    module = Lossy(loss, rnn=nn.GRU(4, 6, batch_first=True), head=nn.Linear(6, 3))
    return sample(module, normal(3, 5, 4), torch.tensor([5, 2, 3]), index(3, 3))


def rnn() -> Sample:
    def loss(self, x, h, y):
        out, h = self.rnn(x, h)
        return F.mse_loss(self.head(out), y) + h.square().mean()

    rnn = nn.RNN(4, 6, 3, nonlinearity="relu")
    module = Lossy(loss, rnn=rnn, head=nn.Linear(6, 2))
    return sample(module, normal(5, 2, 4), normal(3, 2, 6), normal(5, 2, 2))


def cells() -> Sample:
    """Return a loop over cells, with a detached state between two windows."""

    def loss(self, x, y):
        h = c = x.new_zeros(x.shape[1], 6)
        total = 0.0
        for step in range(x.shape[0]):
            if step == 2:
                h, c = h.detach(), c.detach()
            h, c = self.first(x[step], (h, c))
            h = self.second(h, self.third(h))
            total = total + F.mse_loss(self.head(h), y[step])
        return total

    modules = {"first": nn.LSTMCell(4, 6), "second": nn.GRUCell(6, 6), "third": nn.RNNCell(6, 6)}
    module = Lossy(loss, head=nn.Linear(6, 2), **modules)
    return sample(module, normal(4, 2, 4), normal(4, 2, 2))


def seq2seq() -> Sample:
    """Return an encoder and a decoder with additive attention and teacher forcing."""

    def loss(self, source, target):
        memory, hidden = self.encoder(self.embedding(source))
        mask = source.eq(0)
        hidden, keys, total = hidden[0], self.keys(memory), 0.0
        for step in range(target.shape[1] - 1):
            scores = self.score(torch.tanh(keys + self.query(hidden).unsqueeze(1))).squeeze(-1)
            weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            word = self.embedding(target[:, step])
            hidden = self.decoder(torch.cat([word, context], -1), hidden)
            logits = F.linear(hidden, self.embedding.weight)
            total = total + F.cross_entropy(logits, target[:, step + 1], label_smoothing=0.1)
        return total

    source = index(9, 3, 5) + 1
    source[1, 3:] = 0
    modules = {
        "embedding": nn.Embedding(10, 6, padding_idx=0),
        "encoder": nn.GRU(6, 6, batch_first=True),
        "decoder": nn.GRUCell(12, 6),
        "keys": nn.Linear(6, 5, bias=False),
        "query": nn.Linear(6, 5),
        "score": nn.Linear(5, 1),
    }
    return sample(Lossy(loss, **modules), source, index(9, 3, 4) + 1)


def tcn() -> Sample:
    """Return dilated causal convolutions with weight normalisation."""
    from torch.nn.utils.parametrizations import weight_norm

    class Block(nn.Module):
        def __init__(self, i: int, o: int, dilation: int):
            super().__init__()
            self.pad = 2 * dilation
            self.first = weight_norm(nn.Conv1d(i, o, 3, dilation=dilation, padding=self.pad))
            self.second = weight_norm(nn.Conv1d(o, o, 3, dilation=dilation, padding=self.pad))
            self.skip = nn.Conv1d(i, o, 1) if i != o else nn.Identity()
            self.drop = nn.Dropout1d(0.2)

        def forward(self, x):
            y = self.drop(F.relu(self.first(x)[..., : -self.pad].contiguous()))
            y = self.drop(F.relu(self.second(y)[..., : -self.pad]))
            return F.relu(y + self.skip(x))

    module = nn.Sequential(Block(3, 6, 1), Block(6, 6, 2), nn.Conv1d(6, 4, 1))
    return sample(module, normal(2, 3, 10), loss=F.cross_entropy, targets=(index(4, 2, 10),))


def wavenet() -> Sample:
    """Return gated convolutions with skip connections."""

    def loss(self, x, y):
        h, skips = self.first(x), 0.0
        for i, layer in enumerate(self.layers):
            gate = F.glu(layer(F.pad(h, (2**i, 0))), 1)
            h, skips = h + gate, skips + gate
        return F.cross_entropy(self.last(F.elu(skips)), y)

    layers = nn.ModuleList(nn.Conv1d(6, 12, 2, dilation=2**i) for i in range(3))
    module = Lossy(loss, first=nn.Conv1d(2, 6, 1), layers=layers, last=nn.Conv1d(6, 5, 1))
    return sample(module, normal(2, 2, 9), index(5, 2, 9))


def language_model() -> Sample:
    """Return a model of words with tied embeddings and a cell with layer normalisation."""

    def loss(self, tokens):
        out, _ = self.rnn(self.embedding(tokens[:, :-1]))
        logits = self.head(F.layer_norm(out, (6,)))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    module = Lossy(
        loss,
        embedding=nn.Embedding(12, 6),
        rnn=nn.LSTM(6, 6, batch_first=True),
        head=nn.Linear(6, 12),
    )
    module.head.weight = module.embedding.weight
    return sample(module, index(12, 2, 6))


SEQUENCES = {
    "lstm": lstm,
    "gru_packed": gru_packed,
    "gru_masked": gru_masked,
    "rnn": rnn,
    "cells": cells,
    "seq2seq": seq2seq,
    "tcn": tcn,
    "wavenet": wavenet,
    "language_model": language_model,
}
