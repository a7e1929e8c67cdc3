"""Whole networks: diffusers' autoencoder and UNet with random weights, a ResNet with group norm."""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import groupnorm.torch as ours

pytestmark = pytest.mark.filterwarnings("ignore")
FORMATS = [torch.contiguous_format, torch.channels_last]


def diffusers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("diffusers")


class Bottleneck(nn.Module):
    """As in torchvision, with group norm in place of batch norm."""

    def __init__(self, channels, width, out, stride=1):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.GroupNorm(8, width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.GroupNorm(8, width)
        self.conv3, self.norm3 = nn.Conv2d(width, out, 1, bias=False), nn.GroupNorm(8, out)
        self.skip = nn.Sequential(
            nn.Conv2d(channels, out, 1, stride, bias=False), nn.GroupNorm(8, out)
        )

    def forward(self, x):
        y = functional.relu(self.norm1(self.conv1(x)))
        y = functional.relu(self.norm2(self.conv2(y)))
        return functional.relu(self.norm3(self.conv3(y)) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()
        )
        self.body = nn.Sequential(Bottleneck(16, 16, 32), Bottleneck(32, 16, 64, 2))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.body(self.stem(x)).mean(dim=(2, 3)))


def resnet():
    return ResNet(), (torch.randn(2, 3, 32, 32),)


class Decoder(nn.Module):
    def __init__(self, autoencoder):
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, latent):
        return self.autoencoder.decode(latent, return_dict=False)[0]


def autoencoder():
    """Stable Diffusion's configuration, on a small latent."""
    kl = diffusers().AutoencoderKL(
        in_channels=3, out_channels=3, latent_channels=4, layers_per_block=2, norm_num_groups=32,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512), act_fn="silu", sample_size=512,
    )  # fmt: skip
    return Decoder(kl), (torch.randn(1, 4, 8, 8),)


class Denoiser(nn.Module):
    def __init__(self, unet):
        super().__init__()
        self.unet = unet

    def forward(self, latent, step, text):
        return self.unet(latent, step, text, return_dict=False)[0]


def unet():
    """The blocks of Stable Diffusion's UNet, fewer and narrower."""
    model = diffusers().UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, norm_num_groups=8,
        block_out_channels=(32, 64), cross_attention_dim=16, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        resnet_time_scale_shift="scale_shift",
    )  # fmt: skip
    return Denoiser(model), (torch.randn(2, 4, 16, 16), torch.tensor(7), torch.randn(2, 5, 16))


def run(model, arguments, train):
    if not train:
        with torch.no_grad():
            return [model(*arguments)]
    model.zero_grad()
    y = model(*arguments)
    y.square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("way", ["replace", "compile", "override"])
@pytest.mark.parametrize("format_", FORMATS, ids=["first", "last"])
@pytest.mark.parametrize(("make", "train"), [(resnet, True), (unet, True), (autoencoder, False)])
def test_same_outputs_and_gradients(make, train, format_, way):
    model, arguments = make()
    model = model.to(memory_format=format_)
    arguments = [a.contiguous(memory_format=format_) if a.dim() == 4 else a for a in arguments]
    # In float64 torch is right in every memory format.
    wanted = run(
        copy.deepcopy(model).double(),
        [a.double() if a.is_floating_point() else a for a in arguments],
        train,
    )
    around = contextlib.nullcontext()
    if way == "replace":
        assert ours.replace(model)
    elif way == "compile":
        torch._dynamo.reset()
        model = torch.compile(model, backend="groupnorm")
    else:
        around = ours.override()
    with around:
        got = run(model, arguments, train)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        scale = b.abs().max().item()
        assert (a.double() - b).abs().max().item() <= 2e-4 * scale + 1e-7


def test_training_gives_the_same_losses():
    def losses(change):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(),
            nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2),
        )  # fmt: skip
        change(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen = []
        for _ in range(200):
            labels = torch.randint(0, 2, (16,))
            x = torch.randn(16, 1, 8, 8) * (1 + labels.float()[:, None, None, None])
            loss = functional.cross_entropy(model(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return torch.tensor(seen)

    theirs, replaced = losses(lambda model: None), losses(ours.replace)
    with ours.override():
        overridden = losses(lambda model: None)
    assert theirs[-20:].mean() < 0.6 * theirs[:5].mean()
    for got in (replaced, overridden):
        torch.testing.assert_close(got[:20], theirs[:20], rtol=1e-3, atol=1e-3)
        assert abs(got[-50:].mean() - theirs[-50:].mean()) < 0.05
