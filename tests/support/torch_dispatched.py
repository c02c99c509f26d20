"""Small networks whose training steps a library computes, and the functions that it takes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch_zoo.dense import unet

from relax_grad.frontend.torch import from_module
from relax_grad.training import SGD, train_step


class Residual(nn.Module):
    """Blocks of ResNet and U-Net: batch and group normalisation, a skip, a transposed
    convolution."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.second, self.groups = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.GroupNorm(4, 8)
        self.up, self.instances = nn.ConvTranspose2d(8, 4, 2, 2), nn.InstanceNorm2d(4, affine=True)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        x = x + F.relu(self.groups(self.second(x)))
        return self.head(F.relu(self.instances(self.up(x))).mean((2, 3)))


class Decoder(nn.Module):
    """A block of GPT or Llama: causal attention, layer and root-mean-square normalisation."""

    def __init__(self, causal=True):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16, bias=False)
        self.root, self.wide, self.narrow = nn.RMSNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head, self.causal = nn.Linear(16, 11), causal

    def forward(self, tokens):
        x = self.embedding(tokens)
        parts = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.narrow(F.gelu(self.wide(self.root(x))))
        return self.head(x).flatten(0, 1)


class Patches(nn.Module):
    """A vision transformer: patches by a convolution, an encoder layer of PyTorch."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.layer(self.patches(x).flatten(2).mT).mean(1))


IMAGES, CLASSES = torch.randn(2, 3, 12, 12), torch.tensor([1, 4])
TOKENS = torch.arange(14).reshape(2, 7) % 11
NETWORKS = {
    "residual": (Residual, IMAGES, CLASSES),
    "decoder": (Decoder, TOKENS, TOKENS.flatten()),
    "vision transformer": (Patches, IMAGES, CLASSES),
    "U-Net": (lambda: unet().module.float(), IMAGES, torch.arange(288).reshape(2, 12, 12) % 3),
}

#: What the library computes of the step, besides convolutions and products.
WANTED = {
    "residual": {
        *("batch_norm_and_statistics", "batch_norm_gradients"),
        *("group_norm_and_statistics", "group_norm_gradients"),
        *("nn.log_softmax", "grad.log_softmax_backward", "matmul_bias"),
    },
    "decoder": {
        *("layer_norm_and_statistics", "layer_norm_gradients"),
        *("attention_and_log_sum_exp", "attention_gradients"),
        *("nn.log_softmax", "grad.log_softmax_backward", "matmul_bias"),
    },
}


def step_of(name, **options):
    """Return the training step of a network, with options, and its batch."""
    torch.manual_seed(0)
    make, x, target = NETWORKS[name]
    imported = from_module(make(), (x,), loss=nn.CrossEntropyLoss(), targets=(target,))
    step = train_step(imported, SGD(lr=1.0, momentum=0.9), **options)
    return step, (x.numpy(), target.numpy())
