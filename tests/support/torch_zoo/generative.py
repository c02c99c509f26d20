"""Autoencoders, normalizing flows, diffusion, and the losses of adversarial networks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from .parts import Lossy, Sample, index, normal, sample, unit


def autoencoder() -> Sample:
    layers = [
        nn.Conv2d(1, 6, 3, 2, 1),
        nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        nn.ELU(),
    ]
    layers += [
        nn.Conv2d(6, 3, 3, 2, 1),
        nn.Hardtanh(),
        nn.ConvTranspose2d(3, 6, 3, 2, 1, output_padding=1),
    ]
    layers += [
        nn.GroupNorm(2, 6),
        nn.Softplus(),
        nn.ConvTranspose2d(6, 1, 4, 2, 1, groups=1),
        nn.Sigmoid(),
    ]
    x = unit(2, 1, 8, 8)
    return sample(nn.Sequential(*layers), x, loss=F.binary_cross_entropy, targets=(x,))


class _Vae(nn.Module):
    """A variational autoencoder that returns its noise, and takes it in the place of drawn
    numbers."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.1), nn.Linear(8, 8)
        )
        self.decoder = nn.Linear(4, 6)

    def forward(self, x, noise=None):
        mean, log_variance = self.encoder(x).chunk(2, -1)
        noise = torch.randn_like(mean) if noise is None else noise
        latent = mean + noise * torch.exp(0.5 * log_variance)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        reconstruction = F.binary_cross_entropy_with_logits(self.decoder(latent), x)
        return {"loss": reconstruction + 0.1 * divergence, "noise": noise}


def vae() -> Sample:
    return sample(_Vae(), unit(8, 6), replay=("noise",), forward=False)


class _DropPath(nn.Module):
    """Residual branches that are dropped for whole samples, with the masks of timm's form."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU()) for _ in range(2)
        )

    def forward(self, x, noise=None):
        if noise is None:
            noise = x.new_empty(2, x.shape[0], 1).bernoulli_(0.7)
        for layer, mask in zip(self.layers, noise, strict=True):
            x = x + layer(x) * mask / 0.7
        return {"loss": x.square().mean(), "noise": noise}


def drop_path() -> Sample:
    return sample(_DropPath(), normal(8, 6), replay=("noise",), forward=False)


class _Codebook(nn.Module):
    """A quantised autoencoder with a codebook that follows averages of its vectors, and a
    straight-through gradient."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(1, 4, 3, 2, 1), nn.ConvTranspose2d(4, 1, 4, 2, 1)
        self.register_buffer("codes", torch.randn(8, 4))
        self.register_buffer("counts", torch.zeros(8))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x):
        z = self.encoder(x).permute(0, 2, 3, 1)
        flat = z.reshape(-1, 4)
        distances = (
            flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codes.t() + self.codes.pow(2).sum(1)
        )
        places = distances.argmin(1)
        code = F.embedding(places, self.codes).view(z.shape)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(places, 8).to(flat.dtype)
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hot.t() @ flat, alpha=0.1)
                total = self.counts.sum()
                smooth = (self.counts + 1e-5) / (total + 8e-5) * total
                self.codes.copy_(self.sums / smooth.unsqueeze(1))
        commitment = F.mse_loss(code.detach(), z)
        code = z + (code - z).detach()
        return F.mse_loss(self.decoder(code.permute(0, 3, 1, 2)), x) + 0.25 * commitment


def vq_vae() -> Sample:
    return sample(_Codebook(), normal(2, 1, 8, 8))


def real_nvp() -> Sample:
    """Return affine couplings with masks and permutations."""

    def loss(self, x):
        determinant = 0.0
        for mask, scale, shift in zip(self.masks, self.scales, self.shifts, strict=True):
            kept = x * mask
            s, t = torch.tanh(scale(kept)) * (1 - mask), shift(kept) * (1 - mask)
            x = kept + (1 - mask) * (x * s.exp() + t)
            determinant = determinant + s.sum(1)
            x = x.flip(1)
        density = -0.5 * (x**2 + math.log(2 * math.pi)).sum(1)
        return -(density + determinant).mean()

    def nets():
        return nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.Mish(), nn.Linear(8, 4)) for _ in range(2)
        )

    masks = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1]])
    return sample(Lossy(loss, masks=masks, scales=nets(), shifts=nets()), normal(5, 4))


def glow() -> Sample:
    """Return an invertible 1x1 convolution by LU factors, actnorm, and a coupling."""

    def loss(self, x):
        x = (x + self.shift) * self.scale.exp()
        lower = torch.tril(self.lower, -1) + torch.eye(4, dtype=x.dtype)
        upper = torch.triu(self.upper, 1) + torch.diag(self.diagonal.exp())
        x = F.conv2d(x, (lower @ upper)[:, :, None, None])
        kept, changed = x.chunk(2, 1)
        s, t = self.net(kept).split(2, 1)
        s = torch.sigmoid(s + 2.0)
        changed = (changed + t) * s
        determinant = 16 * (self.scale.sum() + self.diagonal.sum()) + s.log().sum((1, 2, 3))
        z = torch.cat([kept, changed], 1)
        return (0.5 * z.square().sum((1, 2, 3)) - determinant).mean()

    modules = {name: nn.Parameter(torch.randn(4, 4) * 0.1) for name in ("lower", "upper")}
    modules |= {name: nn.Parameter(torch.randn(1, 4, 1, 1) * 0.1) for name in ("shift", "scale")}
    modules["diagonal"] = nn.Parameter(torch.randn(4) * 0.1)
    return sample(Lossy(loss, net=nn.Conv2d(2, 4, 3, padding=1), **modules), normal(2, 4, 4, 4))


def masked_flow() -> Sample:
    """Return an autoregressive network with masked weights, and a mixture of normal
    distributions."""

    def loss(self, x):
        h = F.relu(F.linear(x, self.first.weight * self.mask, self.first.bias))
        out = F.linear(h, self.second.weight * self.mask.t().repeat(3, 1), self.second.bias)
        weights, mean, scale = out.view(-1, 3, 4).unbind(1)
        normal = torch.distributions.Normal(mean, F.softplus(scale) + 0.1, validate_args=False)
        return -torch.logsumexp(torch.log_softmax(weights, 1) + normal.log_prob(x), 1).mean()

    mask = (torch.arange(8)[:, None] % 4 >= torch.arange(4)).double()
    return sample(
        Lossy(loss, first=nn.Linear(4, 8), second=nn.Linear(8, 12), mask=mask), normal(5, 4)
    )


def diffusion() -> Sample:
    """Return a denoising network with embeddings of time, on given noise."""

    def loss(self, x, step, noise):
        share = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 10, dtype=x.dtype), 0)[step]
        share = share.view(-1, 1, 1, 1)
        noisy = share.sqrt() * x + (1 - share).sqrt() * noise
        frequencies = torch.exp(-math.log(1e4) * torch.arange(4, dtype=x.dtype) / 4)
        angles = step[:, None].to(x.dtype) * frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        h = F.silu(self.norm(self.first(noisy)) + time[:, :, None, None])
        h = self.second(torch.cat([h, F.interpolate(F.avg_pool2d(h, 2), scale_factor=2)], 1))
        return F.mse_loss(h, noise)

    modules = {"first": nn.Conv2d(2, 8, 3, padding=1), "second": nn.Conv2d(16, 2, 3, padding=1)}
    module = Lossy(loss, time=nn.Linear(8, 8), norm=nn.GroupNorm(4, 8), **modules)
    return sample(module, normal(3, 2, 6, 6), index(10, 3), normal(3, 2, 6, 6))


def _generator() -> nn.Module:
    layers = [nn.ConvTranspose2d(5, 8, 4, 1, 0, bias=False), nn.BatchNorm2d(8), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh())


def _discriminator(wrap=lambda layer: layer) -> nn.Module:
    layers = [wrap(nn.Conv2d(1, 6, 4, 2, 1)), nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*layers, wrap(nn.Conv2d(6, 1, 4)), nn.Flatten(0))


def gan_generator() -> Sample:
    """Return a generator's loss; the discriminator is not trained."""
    module = Lossy(
        lambda self, z: F.softplus(-self.discriminator(self.generator(z))).mean(),
        generator=_generator(),
        discriminator=_discriminator().requires_grad_(False),
    )
    return sample(module, normal(4, 5, 1, 1))


def gan_discriminator() -> Sample:
    """Return a discriminator's loss, with spectral normalisation in its new form."""
    from torch.nn.utils.parametrizations import spectral_norm

    def loss(self, x, z):
        fake = self.generator(z).detach()
        real = F.binary_cross_entropy_with_logits(
            self.discriminator(x), torch.ones(x.shape[0], dtype=x.dtype)
        )
        return real + F.relu(1 + self.discriminator(fake)).mean()

    module = Lossy(loss, generator=_generator(), discriminator=_discriminator(spectral_norm))
    return sample(module, normal(4, 1, 8, 8), normal(4, 5, 1, 1))


def hinge_spectral() -> Sample:
    """Return a discriminator's hinge loss, with spectral normalisation in its old form."""

    def loss(self, x, z):
        return F.relu(1 - self.discriminator(x)).mean() + F.relu(1 + self.discriminator(z)).mean()

    module = Lossy(loss, discriminator=_discriminator(nn.utils.spectral_norm))
    return sample(module, normal(4, 1, 8, 8), normal(4, 1, 8, 8))


def wgan() -> Sample:
    """Return a critic's loss with the slope between real and generated samples as penalty."""

    def loss(self, real, fake):
        of_real, of_fake = self.critic(real), self.critic(fake)
        slope = (of_real - of_fake).abs() / (real - fake).flatten(1).norm(dim=1)
        return of_fake.mean() - of_real.mean() + 10 * (slope - 1).clamp(min=0).square().mean()

    return sample(Lossy(loss, critic=_discriminator()), normal(4, 1, 8, 8), normal(4, 1, 8, 8))


GENERATIVE = {
    "autoencoder": autoencoder,
    "vae": vae,
    "drop_path": drop_path,
    "vq_vae": vq_vae,
    "real_nvp": real_nvp,
    "glow": glow,
    "masked_flow": masked_flow,
    "diffusion": diffusion,
    "gan_generator": gan_generator,
    "gan_discriminator": gan_discriminator,
    "hinge_spectral": hinge_spectral,
    "wgan": wgan,
}
