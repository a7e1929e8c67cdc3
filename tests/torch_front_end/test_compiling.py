"""``torch.compile``: our operators under inductor, and the backend that fuses what it finds."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

import groupnorm
import groupnorm.torch as ours
from groupnorm.torch import compiling

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def fused(x, w, b):
    return ours.group_norm(x * 2, 3, w, b, activation="silu") + 1


def inputs(*shape):
    return (
        torch.randn(*shape, requires_grad=True), torch.randn(6, requires_grad=True),
        torch.randn(6, requires_grad=True),
    )  # fmt: skip


def check_training(compiled, plain, tensors, **tolerance):
    got, wanted = compiled(*tensors), plain(*tensors)
    torch.testing.assert_close(got, wanted, **tolerance)
    leaves = [t for t in tensors if t.requires_grad]
    dy = torch.randn_like(wanted)
    for a, b in zip(
        torch.autograd.grad(got, leaves, dy), torch.autograd.grad(wanted, leaves, dy), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_the_whole_call_is_one_graph(backend):
    compiled = torch.compile(fused, backend=backend, fullgraph=True)
    check_training(compiled, fused, inputs(2, 6, 4, 4))
    with torch.no_grad():
        check = inputs(2, 6, 5)
        torch.testing.assert_close(compiled(*check), fused(*check))


def test_dynamic_shapes():
    compiled = torch.compile(fused, fullgraph=True, dynamic=True)
    for n, size in ((2, 4), (3, 5), (5, 7)):
        check_training(compiled, fused, inputs(n, 6, size, size))


def test_channels_last_is_kept():
    compiled = torch.compile(fused, fullgraph=True)
    x, w, b = inputs(2, 6, 4, 4)
    x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    assert compiled(x, w, b).stride() == fused(x, w, b).stride()


def test_the_layer_and_a_residual():
    layer = ours.GroupNorm(3, 6, activation="gelu")

    def call(x, r):
        y, total = ours.group_norm(x, 2, residual=r)
        return layer(y) + total

    x, r = torch.randn(2, 6, 4, requires_grad=True), torch.randn(2, 6, 4, requires_grad=True)
    check_training(torch.compile(call, fullgraph=True), call, (x, r))


def test_export():
    class Model(nn.Module):
        def forward(self, x, w, b):
            return fused(x, w, b)

    arguments = tuple(t.detach() for t in inputs(2, 6, 4, 4))
    exported = torch.export.export(Model(), arguments)
    assert any("groupnorm" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(*arguments), fused(*arguments))


class ResidualBlock(nn.Module):
    """What diffusion networks are made of, in torch's own words."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(3, 6), nn.GroupNorm(2, 6)
        self.norm3 = nn.GroupNorm(3, 6)
        self.conv = nn.Conv2d(6, 6, 3, padding=1)
        self.linear = nn.Linear(5, 12)

    def forward(self, x, e):
        h = self.conv(functional.silu(self.norm1(x)))
        scale, shift = self.linear(functional.silu(e))[:, :, None, None].chunk(2, dim=1)
        h = functional.silu(self.norm2(h) * (1 + scale) + shift)
        h = x + self.conv(h)
        return functional.gelu(self.norm3(h)) + h


def fused_calls(model, *arguments):
    """The group norms of the graph after the rewrite."""
    graphs = []

    def capture(graph, example_inputs):
        compiling.fuse(graph)
        graphs.append(graph)
        return graph.forward

    torch.compile(model, backend=capture, fullgraph=True)(*arguments)
    return [n for g in graphs for n in g.graph.nodes if n.target is ours.group_norm], graphs


def test_what_the_backend_fuses():
    model, arguments = ResidualBlock(), (torch.randn(2, 6, 4, 4), torch.randn(2, 5))
    (first, second, third), graphs = fused_calls(model, *arguments)
    assert first.kwargs == {"activation": "silu"}
    assert second.kwargs.keys() == {"activation", "scale", "shift"}
    assert third.kwargs["activation"] == "gelu"
    assert isinstance(third.kwargs["residual"], fx.Node)
    left = [n.target for n in graphs[0].graph.nodes]
    assert functional.group_norm not in left
    assert functional.gelu not in left


@pytest.mark.parametrize("options", [None, {"inner": "inductor"}, {"inner": "aot_eager"}])
@pytest.mark.parametrize("format_", [torch.contiguous_format, torch.channels_last])
def test_the_backend_by_its_name(options, format_):
    model = ResidualBlock().to(memory_format=format_)
    x = torch.randn(2, 6, 4, 4).contiguous(memory_format=format_).requires_grad_()
    e = torch.randn(2, 5, requires_grad=True)
    compiled = torch.compile(model, backend="groupnorm", options=options)
    check_training(compiled, model, (x, e), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, e), model(x, e), rtol=1e-4, atol=1e-4)


def never_fused(x, w):
    a = functional.group_norm(x, 3)
    first = functional.silu(a) + a  # somebody else reads what is between
    b = functional.group_norm(x, 3) * (1 + w)  # not per channel
    c = functional.group_norm(x, 3) * w.mean()
    h = x + x.mean()  # a sum, but not of two tensors alike
    return first + b + c + functional.group_norm(h, 2)


def test_what_must_not_be_fused():
    x, w = torch.randn(2, 6, 4, 4), torch.randn(2, 6, 4, 4)
    calls, _ = fused_calls(never_fused, x, w)
    assert [dict(n.kwargs) for n in calls] == [{}] * 4
    compiled = torch.compile(never_fused, backend="groupnorm")
    torch.testing.assert_close(compiled(x, w), never_fused(x, w), rtol=1e-5, atol=1e-5)


def writes_around(x):
    z = x * 2
    h = functional.group_norm(z, 3)
    z = functional.relu(z, inplace=True)
    z.add_(1)
    return functional.silu(h) + z


def writes_only(x):
    x.add_(1)
    return x * 2


def without_gradient(x, y):
    with torch.no_grad():
        h = functional.group_norm(x, 3)
    return functional.silu(h) + y


def sum_outside(x, y):
    q = x + y
    with torch.no_grad():
        h = functional.group_norm(q, 3)
    return functional.silu(h) + q


def added_in_place(x, y):
    q = y * 1
    q += 1
    return functional.group_norm(x, 3) * q + q


def into_a_buffer(x, y):
    buffer = torch.empty_like(x)
    torch.mul(functional.group_norm(x, 3), 1 + y, out=buffer)
    return buffer


def by_keyword(x, y):
    return torch.add(torch.mul(functional.group_norm(x, 3), other=1 + y), other=y)


def twice_the_same(x, y):
    p = functional.group_norm(x, 3) * (1 + y)
    return p + p


def two_norms_of_a_sum(x, y):
    q = x + y
    a, b = functional.group_norm(q, 3), functional.group_norm(q, 2)
    return functional.silu(a) + b


@pytest.mark.parametrize(
    "function",
    [writes_around, writes_only, without_gradient, sum_outside, added_in_place, into_a_buffer,
     by_keyword, twice_the_same, two_norms_of_a_sum],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 4, 4)])
def test_what_else_a_graph_does_is_kept(function, shape):
    def run(call):
        torch.manual_seed(0)
        # y is [N, C, 1, ...], so that it could be a scale, and of two dimensions also a residual.
        x, y = torch.randn(shape), torch.randn(shape[:2] + (1,) * (len(shape) - 2))
        if function in (sum_outside, two_norms_of_a_sum):
            y = torch.randn(shape)
        arguments = (x, y)[: function.__code__.co_argcount]
        gradients = function in (without_gradient, sum_outside, by_keyword, two_norms_of_a_sum)
        for a in arguments:
            a.requires_grad_(gradients)
        out = call(*arguments)
        if gradients:
            out.square().sum().backward()
        return [out.detach(), *(a.detach() for a in arguments), *(a.grad for a in arguments)]

    for got, wanted in zip(
        run(torch.compile(function, backend="groupnorm")), run(function), strict=True
    ):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_counters_still_count():
    model = nn.Sequential(nn.BatchNorm2d(6), nn.GroupNorm(3, 6), nn.SiLU())
    compiled = torch.compile(model, backend="groupnorm")
    compiled(torch.randn(2, 6, 3, 3))
    assert model[0].num_batches_tracked == 1


def test_transforms_inside_a_compiled_function():
    def call(x):
        return torch.func.grad(lambda q: ours.group_norm(q, 3).square().sum())(x)

    x = torch.randn(2, 6, 4)
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x))


def test_groupnorm_group_norm_compiles():
    def call(x):
        return groupnorm.group_norm(x, 3, activation="silu")

    x = torch.randn(2, 6, 4)
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x))


def test_unknown_options_are_refused():
    with pytest.raises(Exception, match="inner"):
        torch.compile(never_fused, backend="groupnorm", options={"outer": 1})(
            torch.randn(2, 6, 4, 4), torch.randn(2, 6, 4, 4)
        )
