from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

import groupnorm.torch as ours
from groupnorm.torch.replacement import FoldedActivation


def test_group_norm_is_a_torch_group_norm():
    layer = ours.GroupNorm(3, 6, 1e-3, activation="silu")
    assert isinstance(layer, nn.GroupNorm)
    theirs = nn.GroupNorm(3, 6, 1e-3)
    assert layer.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(layer.state_dict())
    x = torch.randn(2, 6, 5)
    torch.testing.assert_close(layer(x), functional.silu(theirs(x)))
    assert repr(layer) == "GroupNorm(3, 6, eps=0.001, affine=True, bias=True, activation='silu')"
    assert repr(ours.GroupNorm(3, 6)) == repr(nn.GroupNorm(3, 6))
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(again(x), layer(x))
    with pytest.raises(ValueError, match="num_channels"):
        ours.GroupNorm(4, 6)
    assert ours.GroupNorm(3, 6, affine=False, device="meta", dtype=torch.float64).weight is None


def test_saved_and_loaded():
    layer = ours.GroupNorm(2, 4, activation=("swish", 1.5))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).activation == ("swish", 1.5)


def test_ada_group_norm():
    layer = ours.AdaGroupNorm(7, 6, 3, nn.SiLU(), activation="silu")
    x, e = torch.randn(2, 6, 4, 5, requires_grad=True), torch.randn(2, 7)
    scale, shift = layer.linear(functional.silu(e)).chunk(2, dim=1)
    wanted = functional.group_norm(x, 3) * (1 + scale[..., None, None]) + shift[..., None, None]
    torch.testing.assert_close(layer(x, e), functional.silu(wanted))
    layer(x, e).sum().backward()
    assert layer.linear.weight.grad is not None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(),
            nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.GELU("tanh"),
            nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1),
        )  # fmt: skip
        self.norm = nn.GroupNorm(1, 8)

    def forward(self, x):
        return self.norm(self.body(x))


def test_replace_and_restore():
    model, x = Block(), torch.randn(2, 4, 6, 6)
    wanted, text, state = model(x), repr(model), model.state_dict()
    norm = model.norm
    changed = ours.replace(model)
    assert {c.name: c.activation for c in changed} == {
        "body.1": "silu", "body.4": "gelu_tanh", "body.6": None, "norm": None,
    }  # fmt: skip
    assert model.norm is norm
    assert isinstance(model.body[2], FoldedActivation)
    assert model.state_dict().keys() == state.keys()
    torch.testing.assert_close(model(x), wanted)
    assert ours.replace(model) == []
    assert "body.1: GroupNorm with silu folded in" in map(str, changed)
    assert ours.restore(copy.deepcopy(model)) == changed
    assert ours.restore(model) == changed
    assert repr(model) == text
    assert torch.equal(model(x), wanted)
    assert ours.restore(model) == []


def test_replace_leaves_what_others_see():
    shared = nn.GroupNorm(2, 4)
    model = nn.Sequential(shared, nn.SiLU(), nn.Sequential(shared, nn.ReLU()))
    hooked = nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU())
    seen = []
    hooked[0].register_forward_hook(lambda m, i, o: seen.append(o))

    class Mine(nn.GroupNorm):
        pass

    others = nn.Sequential(
        Mine(2, 4), nn.SiLU(), ours.GroupNorm(2, 4, activation="relu"), nn.SiLU()
    )
    x = torch.randn(2, 4, 3)
    for one in (model, hooked, others):
        wanted = one(x)
        before = len(seen)
        ours.replace(one)
        torch.testing.assert_close(one(x), wanted)
        assert len(seen) == before + (one is hooked)
        ours.restore(one)
    assert type(others[2]) is ours.GroupNorm


def test_replace_folds_only_what_runs_in_order():
    class Skip(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x) + x)

    patched = nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU())
    old = patched[0].forward
    patched[0].forward = lambda *a: old(*a)
    x = torch.randn(2, 4, 3)
    for model in (Skip(nn.GroupNorm(2, 4), nn.SiLU()), patched):
        wanted = model(x)
        ours.replace(model)
        torch.testing.assert_close(model(x), wanted)
    apart = nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU())
    wanted = apart[0](x)
    ours.replace(apart, fold=False)
    torch.testing.assert_close(apart[0](x), wanted)


def test_restore_keeps_the_mode():
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU())
    ours.replace(model)
    model.eval()
    ours.restore(model)
    assert not model[1].training


def test_convert_batchnorm_leaves_what_was_changed():
    class Mine(nn.BatchNorm2d):
        pass

    hooked = nn.BatchNorm2d(4)
    hooked.register_forward_hook(lambda *_: None)
    assert not ours.convert_batchnorm(nn.Sequential(Mine(4), hooked)).layers
    features = ours.convert_batchnorm(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    assert features.model(torch.randn(2, 8)).abs().sum() > 0


def test_convert_batchnorm():
    shared = nn.BatchNorm2d(6)
    model = nn.Sequential(
        nn.Conv2d(3, 48, 1), nn.BatchNorm2d(48, eps=1e-3), nn.Conv2d(48, 6, 1), shared, shared,
        nn.Sequential(nn.BatchNorm2d(6, affine=False)),
    )  # fmt: skip
    model.eval()
    nn.init.normal_(model[1].weight)
    weight = model[1].weight
    report = ours.convert_batchnorm(model)
    assert [(c.name, c.num_groups) for c in report.layers] == [("1", 24), ("3", 6), ("5.0", 6)]
    assert report.model is model
    assert model[1].weight is weight
    assert model[1].eps == 1e-3
    assert model[3] is model[4]
    assert model[5][0].weight is None
    assert not model[1].training
    assert model(torch.randn(1, 3, 4, 4)).shape == (1, 6, 4, 4)
    assert "BatchNorm2d(48) is now GroupNorm(24, 48)" in str(report)
    sizes = nn.Sequential(nn.BatchNorm1d(48), nn.BatchNorm1d(7))
    ours.convert_batchnorm(sizes, channels_per_group=16)
    assert [m.num_groups for m in sizes] == [3, 1]
    alone = ours.convert_batchnorm(nn.BatchNorm1d(8), 4)
    assert isinstance(alone.model, ours.GroupNorm)
    with pytest.raises(ValueError, match="num_groups"):
        ours.convert_batchnorm(sizes, 0)
    with pytest.raises(ValueError, match="channels_per_group"):
        ours.convert_batchnorm(sizes, channels_per_group=0)
