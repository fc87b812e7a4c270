"""What fuzzed models are made of: pieces of program text, from `[rows, 6]` to `[rows, 6]` each.

A piece stands in the class of a block or in that of the model, so its names end in `{i}`. It must not name a dtype, as
the reference runs in float64, and must be smooth: a rounding error may not choose a branch.
"""

from __future__ import annotations

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True)
class Piece:
    """Lines of `__init__` and `forward(self, x, ids)`, and what they need before the classes."""

    init: str  # lines of the constructor
    forward: str  # lines that change `x`; `ids` are integers below 7, `[rows, 3]`
    before: str = ""  # lines at the top of the program

    def lines(self, i: int) -> tuple[str, str]:
        """Those of the constructor and of forward, with a number of their own."""
        return self.init.format(i=i), self.forward.format(i=i)


def _calls(module: str, *, residual: bool = False) -> Piece:
    return Piece(f"self.m{{i}} = {module}", f"x = {'x + ' * residual}self.m{{i}}(x)")


def _linear(forward: str, before: str = "") -> Piece:
    """Any use of a linear layer `self.m{i}`."""
    return Piece("self.m{i} = nn.Linear(6, 6)", forward, before)


def _uses(parameter: str, forward: str) -> Piece:
    return Piece(f"self.w{{i}} = nn.Parameter({parameter})", f"x = {forward}")


_MODULES: Final = {
    "linear": _calls("nn.Linear(6, 6)"),
    "mlp": _calls("nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6, bias=False))", residual=True),
    "layer_norm": _calls("nn.LayerNorm(6)"),
    "rms_norm": _calls("nn.RMSNorm(6, eps=1e-5)"),
    "group_norm": _calls("nn.GroupNorm(2, 6)"),
    "batch_norm": _calls("nn.BatchNorm1d(6)"),
    "instance_norm": Piece(
        "self.m{i} = nn.InstanceNorm1d(2, affine=True)", "x = x + self.m{i}(x.reshape(-1, 2, 3)).reshape(-1, 6)"
    ),
    "prelu": _calls("nn.PReLU()"),
    "dropout": _calls("nn.Sequential(nn.Dropout(0.0), nn.Linear(6, 6), nn.Identity())"),
    "conv1d": Piece("self.m{i} = nn.Conv1d(1, 3, 3, padding=1)", "x = self.m{i}(x.unsqueeze(1)).mean(1)"),
    "conv2d": Piece(
        "self.m{i} = nn.Conv2d(1, 2, 3, padding=1)", "x = x + self.m{i}(x.reshape(-1, 1, 2, 3)).sum(1).reshape(-1, 6)"
    ),
    "deconv": Piece("self.m{i} = nn.ConvTranspose1d(1, 1, 3, padding=1)", "x = self.m{i}(x.unsqueeze(1)).squeeze(1)"),
    "channels_last": Piece(
        "self.m{i} = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)",
        "x = x + self.m{i}(x.reshape(-1, 2, 1, 3)).reshape(-1, 6)",
    ),
    "bilinear": Piece("self.m{i} = nn.Bilinear(6, 6, 6)", "x = self.m{i}(x, x.tanh())"),
    "attention": Piece(
        "self.m{i} = nn.MultiheadAttention(6, 2, batch_first=True)",
        "y = x.reshape(-1, 2, 6)\nx = x + self.m{i}(y, y, y, need_weights=False)[0].reshape(-1, 6)",
    ),
    "own_attention": Piece(
        "self.qkv{i} = nn.Linear(6, 18)\nself.o{i} = nn.Linear(6, 6)",
        "q, k, v = self.qkv{i}(x).reshape(-1, 2, 3, 6).unbind(2)\n"
        "x = x + self.o{i}(F.scaled_dot_product_attention(q, k, v).reshape(-1, 6))",
    ),
    "encoder_layer": Piece(
        "self.m{i} = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)",
        "x = self.m{i}(x.reshape(-1, 2, 6)).reshape(-1, 6)",
    ),
    "gru_cell": Piece("self.m{i} = nn.GRUCell(6, 6)", "x = self.m{i}(x, x.cos())"),
    "lstm_cell": Piece("self.m{i} = nn.LSTMCell(6, 6)", "x = self.m{i}(x, (x.cos(), x.sin()))[0]"),
    "embedding": Piece("self.e{i} = nn.Embedding(7, 6)", "x = x + self.e{i}(ids[:, 0])"),
    "padded_embedding": Piece("self.e{i} = nn.Embedding(7, 6, padding_idx=2)", "x = x + self.e{i}(ids).mean(1)"),
    "embedding_bag": Piece("self.e{i} = nn.EmbeddingBag(7, 6, mode='sum')", "x = x + self.e{i}(ids)"),
    "tied_embedding": Piece(
        "self.e{i} = nn.Embedding(7, 6)\nself.h{i} = nn.Linear(6, 7, bias=False)\nself.h{i}.weight = self.e{i}.weight",
        "x = x + self.e{i}(ids[:, 1])\nx = x + self.h{i}(x).softmax(1)[:, :6]",
    ),
    "weight_norm": _calls("nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))"),
    "spectral_norm": _calls("nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))"),
    "symmetric": Piece(
        "self.m{i} = nn.Linear(6, 6)\nparametrize.register_parametrization(self.m{i}, 'weight', Symmetric())",
        "x = self.m{i}(x)",
        "from torch.nn.utils import parametrize\n\n"
        "class Symmetric(nn.Module):\n"
        "    def forward(self, w):\n"
        "        return w.triu() + w.triu(1).T\n",
    ),
    "half_linear": Piece(
        "self.m{i} = nn.Linear(6, 6).to(torch.bfloat16)", "x = x + self.m{i}(x.to(self.m{i}.weight.dtype)).to(x.dtype)"
    ),
    "autocast": _linear("with torch.autocast('cpu', torch.bfloat16):\n    y = self.m{i}(x)\nx = x + y.to(x.dtype)"),
}
_PARAMETERS: Final = {
    "one_element": _uses("torch.ones(1)", "x * self.w{i}"),
    "vector": _uses("torch.linspace(0.5, 1, 6)", "x * self.w{i} + self.w{i}.mean()"),
    "one_row": _uses("torch.randn(1, 6)", "x + self.w{i}"),
    "five_rows": _uses("torch.randn(5, 6) / 3", "x + (x @ self.w{i}.T).tanh() @ self.w{i}"),
    "transposed": _uses("torch.randn(6, 6) / 3", "F.linear(x, self.w{i}.t())"),  # FSDP2 takes no strided parameters
    "cube": _uses("torch.randn(3, 2, 6) / 3", "x + torch.einsum('bi,kji->bi', x, self.w{i})"),
    "einsum": _uses("torch.randn(6, 6) / 3", "torch.einsum('bi,ij->bj', x, self.w{i})"),
    "bmm": _uses("torch.randn(6, 6) / 3", "torch.bmm(x[None], self.w{i}[None])[0]"),
    "addmm": _uses("torch.randn(6, 6) / 3", "torch.addmm(self.w{i}[0], x, self.w{i})"),
    "where": _uses("torch.randn(6)", "torch.where(ids[:, :1] > 3, x, x * self.w{i})"),
    "indexed": _uses("torch.randn(7, 6) / 3", "x + self.w{i}[ids[:, 0]]"),
    "sliced": _uses("torch.randn(9, 6) / 3", "x + self.w{i}[1:5].sum(0) * self.w{i}[-1]"),
    "gathered_row": _uses("torch.randn(7, 3)", "x + self.w{i}.gather(0, ids).repeat(1, 2)"),
    "normalized": _uses("torch.randn(6, 6)", "x + F.linear(x, F.normalize(self.w{i}, dim=1))"),
    "softmaxed": _uses("torch.randn(6, 6)", "x @ self.w{i}.softmax(0)"),
    "flattened": _uses("torch.randn(2, 3)", "x * self.w{i}.view(-1)"),
    "chunked": _uses("torch.randn(6, 12) / 3", "(lambda a, b: x @ a + (x @ b).sigmoid())(*self.w{i}.chunk(2, 1))"),
    "gram": _uses("torch.randn(6, 4) / 3", "x + x @ (self.w{i} @ self.w{i}.T)"),
    "scaled_by_norm": _uses("torch.randn(6, 6)", "x + F.linear(x, self.w{i} / torch.linalg.vector_norm(self.w{i}))"),
    "detached_twin": _uses("torch.randn(6, 6) / 3", "x + x @ self.w{i} - 0.5 * (x @ self.w{i}.detach())"),
    "list": Piece(
        "self.p{i} = nn.ParameterList(torch.randn(6) for _ in range(3))", "for p in self.p{i}:\n    x = x + p.tanh()"
    ),
    "dict": Piece(
        "self.p{i} = nn.ParameterDict({{'a': torch.randn(6), 'b': torch.randn(1)}})",
        "x = x * self.p{i}['a'] + self.p{i}['b']",
    ),
    "stacked": Piece(
        "self.a{i} = nn.Parameter(torch.randn(6))\nself.b{i} = nn.Parameter(torch.randn(6))",
        "x = x + torch.stack([self.a{i}, self.b{i}]).prod(0)",
    ),
    "by_name": Piece(
        "self.first{i} = nn.Parameter(torch.randn(6))", "x = x + getattr(self, 'fir' + 'st{i}') * self.first{i}"
    ),
    "get_parameter": _linear("x = x @ self.get_parameter('m{i}.weight')"),
}
_SHAPES: Final = {
    "twice": _linear("x = self.m{i}(self.m{i}(x).tanh())"),
    "two_names": Piece("self.m{i} = nn.Linear(6, 6)\nself.n{i} = self.m{i}", "x = self.n{i}(self.m{i}(x).relu())"),
    "tied_weights": Piece(
        "self.m{i} = nn.Linear(6, 6)\nself.n{i} = nn.Linear(6, 6)\nself.n{i}.weight = self.m{i}.weight",
        "x = self.n{i}(self.m{i}(x).tanh())",
    ),
    "child_weight": _linear("x = F.linear(self.m{i}(x), self.m{i}.weight.T, self.m{i}.bias)"),
    "module_list": Piece(
        "self.m{i} = nn.ModuleList([nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)])", "for m in self.m{i}:\n    x = m(x)"
    ),
    "same_in_list": Piece(
        "self.m{i} = nn.ModuleList([nn.Linear(6, 6)] * 3)", "for m in self.m{i}:\n    x = x + m(x).tanh()"
    ),
    "module_dict": Piece(
        "self.m{i} = nn.ModuleDict({{'a': nn.Linear(6, 6), 'b': nn.Linear(6, 6)}})",
        "x = sum(m(x) for m in self.m{i}.values()) + self.m{i}['a'](x)",
    ),
    "plain_list": Piece(
        "self.m{i} = nn.Linear(6, 6)\nself.n{i} = nn.LayerNorm(6)\nself.all{i} = [self.m{i}, self.n{i}]",
        "for m in self.all{i}:\n    x = m(x)",
    ),
    "branches": Piece(
        "self.m{i} = nn.Linear(6, 6)\nself.n{i} = nn.Linear(6, 6)",
        "x = self.m{i}(x) + self.n{i}(x).sigmoid() * self.m{i}(x.neg())",
    ),
    "frozen": Piece("self.m{i} = nn.Linear(6, 6).requires_grad_(False)", "x = x + self.m{i}(x)"),
    "frozen_bias": Piece("self.m{i} = nn.Linear(6, 6)\nself.m{i}.bias.requires_grad_(False)", "x = x + self.m{i}(x)"),
    "unused": Piece("self.m{i} = nn.Linear(6, 6)\nself.u{i} = nn.Linear(6, 7)", "x = self.m{i}(x)"),
    "dead_code": _linear("y = self.m{i}(x)\nx = x + 1"),
    "no_grad": _linear("with torch.no_grad():\n    y = self.m{i}(x)\nx = x + y"),
    "detached": _linear("x = x + self.m{i}(x).detach()"),
    "detached_input": _linear("x = x + self.m{i}(x.detach())"),
    "buffer": Piece("self.register_buffer('c{i}', torch.linspace(0, 1, 6))", "x = x + self.c{i}"),
    "running_mean": Piece(
        "self.register_buffer('c{i}', torch.zeros(6))\nself.m{i} = nn.Linear(6, 6)",
        "x = self.m{i}(x - self.c{i})\nif self.training:\n    self.c{i}.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)",
    ),
    "counter": Piece(
        "self.register_buffer('c{i}', torch.zeros((), dtype=torch.long))", "self.c{i} += 1\nx = x + 0.1 * self.c{i}"
    ),
    "graph_break": _linear("x = self.m{i}(x)\ntorch._dynamo.graph_break()\nx = x.tanh()"),
    "on_a_value": _linear("if x.sum() > -1e9:\n    x = self.m{i}(x)"),
    "item": _linear("x = self.m{i}(x) * ids.float().mean().item()"),
    "in_training": _linear("x = self.m{i}(x) if self.training else x"),
    "checkpointed": Piece(
        "self.m{i} = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))",
        "x = x + checkpoint(self.m{i}, x, use_reentrant=False)",
        "from torch.utils.checkpoint import checkpoint\n",
    ),
    "forward_hook": Piece(
        "self.m{i} = nn.Linear(6, 6)\nself.m{i}.register_forward_hook(lambda m, a, out: out + m.bias)",
        "x = self.m{i}(x)",
    ),
    "pre_hook": Piece(
        "self.m{i} = nn.Linear(6, 6)\nself.m{i}.register_forward_pre_hook(lambda m, a: (a[0].tanh(),))",
        "x = self.m{i}(x)",
    ),
    "own_function": Piece(
        "self.w{i} = nn.Parameter(torch.randn(6))",
        "x = Scale.apply(x, self.w{i})",
        "class Scale(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x, w):\n"
        "        ctx.save_for_backward(x, w)\n"
        "        return x * w\n\n"
        "    @staticmethod\n"
        "    def backward(ctx, g):\n"
        "        x, w = ctx.saved_tensors\n"
        "        return g * w, (g * x).sum(0)\n",
    ),
    "not_compiled": _linear(
        "x = outside(self.m{i}, x)", "@torch.compiler.disable\ndef outside(module, x):\n    return module(x)\n"
    ),
    "lazy_buffer": _linear("self.seen{i} = x.shape[0]\nx = self.m{i}(x) / self.seen{i}"),
    "routed": Piece(
        "self.m{i} = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))\nself.g{i} = nn.Linear(6, 3)",
        "g = self.g{i}(x).softmax(1)\nx = sum(g[:, k : k + 1] * m(x) for k, m in enumerate(self.m{i}))",
    ),
    "penalty_of_weights": _linear("x = self.m{i}(x) + 0.1 * sum(p.square().sum() for p in self.m{i}.parameters())"),
}
PIECES: Final[dict[str, Piece]] = _MODULES | _PARAMETERS | _SHAPES
