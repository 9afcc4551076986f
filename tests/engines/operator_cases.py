"""One small program per operator, with inputs that belong to three records."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from record_attack import Input, by_record, draw, ids, mask, tensors, w, x
from torch import Tensor, nn

aten = torch.ops.aten


@dataclass
class Case:
    name: str
    function: Callable
    inputs: list[Input]
    apart: bool = True  # no output of the forward pass belongs to several records
    backward: bool = True


def sdpa(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, m)


def changing(function: Callable) -> Callable:
    """An in-place operator, on a copy so that autograd allows it."""
    return lambda a, *rest: function(a.clone(), *rest)


def write_rows(a: Tensor, b: Tensor) -> Tensor:
    a = a.clone()
    a[:, 1:3] = b[:, 1:3] * 2
    a.view(-1)[::2] += 1
    return a


def batch_norm(training: bool) -> Callable:
    return lambda a, m, v: F.batch_norm(a, m.detach().clone(), v.detach() + 1, training=training)


def lstm(kind: type[nn.RNNBase], **options: object) -> Callable:
    layer = kind(4, 5, **options)
    return lambda a: [t.clone() for t in tensors(layer.to(a.device)(a))]


def scan(kind: str) -> Callable:
    """The scan of a recurrent layer and its backward pass, of (time, records, gates)."""

    def both(p: Tensor, grad: Tensor) -> list[Tensor]:
        torch.manual_seed(0)
        width = grad.shape[2]
        w, b = torch.randn(p.shape[2], width) / 3, torch.randn(p.shape[2])
        h, c = torch.randn(2, p.shape[1], width).unbind()
        output, last, kept = torch.ops.tacit.recurrence(p, h, c, w, b, kind)
        back = torch.ops.tacit.recurrence_backward(p, h, c, w, b, output, kept, grad, h, kind)
        return [output, last, *back]

    return both


def fused_lstm(p: Tensor) -> list[Tensor]:
    """oneDNN's layer, which always has time first."""
    w, b, h = torch.ones(8, 2) / 3, torch.zeros(8), torch.zeros(1, p.shape[1], 2)
    given = p, w, w, b, b, h, h, False, (), 2, 2, 1, True, False, False, True
    return [t.clone() for t in torch.ops.aten.mkldnn_rnn_layer(*given)[:3]]


def masked_put(a: Tensor, m: Tensor, b: Tensor) -> Tensor:
    a = a.clone()
    a[m] = b
    return a


def cases() -> list[Case]:
    torch.manual_seed(0)
    c = Case
    return [
        # pointwise
        c("add", torch.add, [x(3, 4), x(3, 4)]),
        c("broadcast", lambda a, b: a * b, [x(3, 4), w(4)]),
        c("outer product of records", lambda a, b: a[:, None] * b, [x(3), x(3)], apart=False),
        c("where", torch.where, [mask(3, 4), x(3, 4), w(4)]),
        c("masked_fill", lambda a, m: a.masked_fill(m, 0.5), [x(3, 4), mask(3, 4)]),
        c("closed gate", lambda a: a + 0 * a.mean(0), [x(3, 4)], apart=False),
        c("gelu", F.gelu, [x(3, 4)]),
        c("glu", F.glu, [x(3, 4)]),
        c("prelu", F.prelu, [x(3, 4, 2), w(4)]),
        c("logsigmoid", F.logsigmoid, [x(3, 4)]),
        c("dropout", lambda a: F.dropout(a, 0.5), [x(3, 4)]),
        c(
            "bernoulli",
            lambda p: torch.bernoulli(p.clamp(0, 1)),
            [Input(torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1, 2, 3]))],
            backward=False,
        ),
        c(
            "bernoulli_",
            lambda a, p: torch.zeros(3).bernoulli_(p.clamp(0, 1)),
            [x(3), x(3)],
            backward=False,
        ),
        c("rand_like", torch.rand_like, [x(3, 4)], backward=False),
        c("in-place", changing(lambda a, b: a.add_(b).mul_(b).sigmoid_()), [x(3, 4), x(3, 4)]),
        c(
            "out=",
            lambda a, b: torch.mul(a, b, out=torch.empty(3, 4)),
            [x(3, 4), x(3, 4)],
            backward=False,
        ),
        c("copy_ over", changing(lambda a, b: a.copy_(b)), [x(3, 4), w(4)]),
        c(
            "bernoulli out=",
            lambda p: torch.bernoulli(p.clamp(0, 1), out=torch.empty(3)),
            [x(3)],
            backward=False,
        ),
        c(
            "stack out=",
            lambda a: torch.stack([a, a], out=torch.empty(2, 3, 4)),
            [x(3, 4)],
            backward=False,
        ),
        c("rrelu", lambda a: F.rrelu(a - 0.5, training=True), [x(3, 4)]),
        c("zero_", changing(lambda a: a.zero_()), [x(3, 4)]),
        # views and copies
        c("write through views", write_rows, [x(3, 4), x(3, 4)]),
        c(
            "transpose, flatten, unfold",
            lambda a: a.transpose(1, 2).reshape(3, -1).unfold(1, 3, 2),
            [x(3, 4, 2)],
        ),
        c("complex", lambda a: torch.view_as_real(torch.view_as_complex(a) * 1j), [x(3, 4, 2)]),
        c(
            "view(dtype)",
            lambda a: a.view(torch.int32).view(torch.float32) + 0,
            [x(3, 4)],
            backward=False,
        ),
        c("bytes", lambda a: a.view(torch.uint8).clone(), [x(3, 4)], backward=False),
        c("deepcopy", copy.deepcopy, [x(3, 4)], backward=False),
        c("cat stack pad", lambda a, b: F.pad(torch.cat([a, b], 1), (1, 2)), [x(3, 4), w(3, 2)]),
        c("stack", lambda a, b: torch.stack([a, b], 1), [x(3, 4), x(3, 4)]),
        c("roll over records", lambda a: a + a.roll(1, 0), [x(3, 4)], apart=False),
        c("flip repeat tril", lambda a: torch.tril(a.flip(1).repeat(1, 2, 1)), [x(3, 4, 4)]),
        c("tril_", changing(lambda a: a.tril_()), [x(3, 4, 4)]),
        c("reflection_pad", lambda a: F.pad(a, (1, 1), mode="reflect"), [x(3, 2, 4)]),
        c("replication_pad", lambda a: F.pad(a, (1, 1, 1, 1), mode="replicate"), [x(3, 2, 4, 4)]),
        c("circular_pad", lambda a: F.pad(a, (1, 1), mode="circular"), [x(3, 2, 4)]),
        c("pixel_shuffle", lambda a: F.pixel_shuffle(a, 2), [x(3, 4, 2, 2)]),
        c("split", lambda a: torch.split_with_sizes_copy(a, [1, 3], 1), [x(3, 4)]),
        c("select", lambda a: (a[1], a[:, 1], a[..., ::2]), [x(3, 4)]),
        c("scatter into slices", lambda a, b: torch.select_scatter(a, b, 1, 2), [x(3, 4), x(3)]),
        c("diag", lambda a: torch.diag_embed(a).diagonal(0, 1, 2) * 2, [x(3, 4)]),
        c(
            "as_strided windows",
            lambda a: a.as_strided((3, 3), (1, 1)).clone(),
            [x(3, 4)],
            backward=False,
        ),
        c("zero size", lambda a: (a[:0].sum(), a[:, :0].mean(1), torch.cat([a[:0], a])), [x(3, 4)]),
        # reductions and along a dimension
        *[
            c(
                f"{n} dim",
                lambda a, n=n: getattr(torch, n)(a, dim=1),
                [x(3, 4)],
                backward=n not in ("all", "any"),
            )
            for n in (
                "sum",
                "mean",
                "amax",
                "prod",
                "var",
                "std",
                "logsumexp",
                "softmax",
                "log_softmax",
                "cumsum",
                "cumprod",
                "sort",
                "argsort",
                "max",
                "median",
                "argmax",
                "all",
                "any",
                "var_mean",
                "aminmax",
                "logcumsumexp",
                "nansum",
                "cummax",
                "mode",
                "nanmean",
            )
        ],
        *[
            c(f"{n} all", lambda a, n=n: getattr(torch, n)(a), [x(3, 4)], apart=False)
            for n in (
                "sum",
                "mean",
                "amax",
                "prod",
                "var",
                "norm",
                "max",
                "median",
                "argmin",
                "any",
                "aminmax",
                "count_nonzero",
                "histc",
                "std_mean",
            )
        ],
        c("softmax over records", lambda a: a.softmax(0), [x(3, 4)], apart=False),
        c("keepdim, negative dims", lambda a: a.sum((-1, -2), keepdim=True), [x(3, 4, 2)]),
        c("no dims", lambda a: a.sum([]), [x(3, 4)], apart=False),
        c(
            "0-dim",
            lambda a: (a[1].sum(), a[1, 1].softmax(0), a[1, 1].sum(0), a[1, 1].cumsum(0)),
            [x(3, 4)],
        ),
        c(
            "norms",
            lambda a: (torch.linalg.vector_norm(a, dim=1), a.norm(2, -1), F.normalize(a)),
            [x(3, 4)],
        ),
        c("topk", lambda a: a.topk(2, -1), [x(3, 4)]),
        c("kthvalue", lambda a: a.kthvalue(2, -1), [x(3, 4)]),
        c("renorm", lambda a: a.renorm(2, 0, 0.5), [x(3, 4)]),
        c("multinomial", lambda a: torch.multinomial(a, 2), [x(3, 8)], backward=False),
        c("fft", lambda a: torch.fft.irfft(torch.fft.rfft(a)), [x(3, 4)]),
        c("fft2", lambda a: torch.fft.fft2(a).abs(), [x(3, 4, 4)]),
        c("searchsorted", torch.searchsorted, [x(3, 4), x(3, 5)], backward=False),
        c("bucketize", torch.bucketize, [x(3, 5), w(4)], backward=False),
        c("max of two", torch.max, [x(3, 4), x(3, 4)]),
        c("quantile", lambda a: a.quantile(0.3, dim=1), [x(3, 4)]),
        # matrices
        c("mm", torch.mm, [x(3, 4), w(4, 5)]),
        c("mm of records", lambda a: a @ a.T, [x(3, 4)], apart=False),
        c("addmm", torch.addmm, [w(5), x(3, 4), w(4, 5)]),
        c("records last", torch.mm, [w(5, 4), x(4, 3, dim=1)]),
        c("bmm", torch.bmm, [x(3, 4, 2), x(3, 2, 5)]),
        c("baddbmm", torch.baddbmm, [x(3, 4, 5), x(3, 4, 2), x(3, 2, 5)]),
        c("addbmm", torch.addbmm, [w(4, 5), x(3, 4, 2), x(3, 2, 5)], apart=False),
        c("mv dot", lambda a, b: (torch.mv(a, b), torch.dot(a[1], b)), [x(3, 4), w(4)]),
        c("addmv", torch.addmv, [x(3), x(3, 4), w(4)]),
        c("addr", torch.addr, [x(3, 4), x(3), w(4)]),
        c("einsum", lambda a, b: torch.einsum("btd,dhk->bhtk", a, b), [x(3, 4, 2), w(2, 2, 3)]),
        c("bilinear", F.bilinear, [x(3, 4), x(3, 5), w(2, 4, 5), w(2)]),
        c("linear", F.linear, [x(3, 2, 4), w(5, 4), w(5)]),
        c("cdist", torch.cdist, [x(3, 4, 2), x(3, 5, 2)]),
        c("cdist over records", torch.cdist, [x(3, 2), w(5, 2)]),
        c("inverse", lambda a: torch.linalg.inv(a + 3 * torch.eye(3)), [x(3, 3, 3)]),
        c(
            "solve",
            lambda a, b: torch.linalg.solve(a + 3 * torch.eye(3), b),
            [x(3, 3, 3), x(3, 3, 2)],
        ),
        c("cholesky", lambda a: torch.linalg.cholesky(a @ a.mT + torch.eye(3)), [x(3, 3, 3)]),
        c("svd", lambda a: torch.linalg.svdvals(a), [x(3, 3, 3)]),
        c(
            "det",
            lambda a: (torch.linalg.det(a), torch.linalg.slogdet(a + torch.eye(3))),
            [x(3, 3, 3)],
        ),
        c("cross", lambda a, b: torch.linalg.cross(a, b), [x(3, 4, 3), x(3, 4, 3)]),
        # indexing
        c(
            "index rows",
            lambda a, i: a[i],
            [x(3, 4), ids(3, 5, dim=None)],
            backward=True,
        ),
        c("index by own data", lambda a, i: a[torch.arange(3), i], [x(3, 4), ids(4, 3)]),
        c(
            "index two",
            lambda a, i, j: a[i, :, j],
            [x(3, 4, 5), ids(3, 2, dim=None), ids(5, 2, dim=None)],
        ),
        c("index mask", lambda a, m: a[m], [x(3, 4), mask(3, 4)]),
        c("public mask", lambda a, m: a[m], [x(3, 4), mask(3, dim=None)]),
        c(
            "index_put",
            lambda a, i, b: a.index_put((torch.arange(3), i), b),
            [x(3, 4), ids(4, 3), x(3)],
        ),
        c(
            "index_put add",
            lambda a, i, b: a.index_put((i,), b, accumulate=True),
            [w(4, 2), ids(4, 3, dim=None), x(3, 2)],
            apart=False,
        ),
        c("mask put", masked_put, [x(3, 4), mask(3, 4), by_record(draw(1)[0], None)]),
        c("gather", lambda a, i: a.gather(1, i), [x(3, 4), ids(4, 3, 2)]),
        c("gather across", lambda a, i: a.gather(0, i), [x(3, 4), ids(3, 2, 4, dim=None)]),
        c("take_along_dim", lambda a, i: torch.take_along_dim(a, i, 1), [x(3, 4), ids(4, 3, 4)]),
        c("index_select", lambda a, i: a.index_select(1, i), [x(3, 4), ids(4, 2, dim=None)]),
        c("take", torch.take, [w(12), ids(12, 3)]),
        c(
            "scatter own",
            lambda a, i, b: a.scatter(1, i, b),
            [x(3, 4), ids(4, 3, 2), x(3, 2)],
            backward=False,
        ),
        c("one-hot", lambda i: torch.zeros(3, 5).scatter_(1, i[:, None], 1.0), [ids(5, 3)]),
        c(
            "scatter_add own",
            lambda a, i, b: a.scatter_add(1, i, b),
            [x(3, 4), ids(4, 3, 2), x(3, 2)],
        ),
        c(
            "scatter_add across",
            lambda a, i, b: a.scatter_add(0, i, b),
            [w(4, 2), ids(4, 3, 2), x(3, 2)],
            apart=False,
        ),
        c(
            "scatter_reduce",
            lambda a, i, b: a.scatter_reduce(1, i, b, "amax"),
            [x(3, 4), ids(4, 3, 2), x(3, 2)],
            backward=False,
        ),
        c(
            "index_add",
            lambda a, i, b: a.index_add(0, i, b),
            [w(4, 2), ids(4, 3, dim=None), x(3, 2)],
            apart=False,
        ),
        c(
            "index_add private",
            lambda a, i, b: a.index_add(0, i, b),
            [w(4, 2), ids(4, 3), x(3, 2)],
            apart=False,
        ),
        c(
            "index_copy",
            lambda a, i, b: a.index_copy(1, i, b),
            [x(3, 4), by_record(torch.tensor([1, 3]), None, 4), x(3, 2)],
        ),
        c("index_fill", lambda a, i: a.index_fill(1, i, 0.5), [x(3, 4), ids(4, 2, dim=None)]),
        c(
            "put",
            lambda a, i, b: a.put(i, b),
            [w(12), by_record(torch.tensor([0, 5, 7]), None, 12), x(3)],
            backward=False,
        ),
        c(
            "masked_scatter",
            lambda a, m, b: a.masked_scatter(m, b),
            [x(3, 4), mask(3, 4, dim=None), x(3, 4)],
            apart=False,
        ),
        c("masked_select", torch.masked_select, [x(3, 4), mask(3, 4)]),
        c("nonzero", lambda a: (a > 0.6).nonzero(), [x(3, 4)], backward=False),
        c("embedding", lambda i, a: F.embedding(i, a), [ids(6, 3, 4), w(6, 2)]),
        c("embedding_bag", lambda i, a: F.embedding_bag(i, a), [ids(6, 3, 4), w(6, 2)]),
        c(
            "embedding_bag weighted",
            lambda i, a, p: F.embedding_bag(i, a, per_sample_weights=p, mode="sum"),
            [ids(6, 3, 4), w(6, 2), x(3, 4)],
        ),
        c("repeat_interleave", lambda a: a.repeat_interleave(2, 1), [x(3, 4)]),
        c("unique", lambda i: torch.unique(i), [ids(6, 3)], apart=False),
        # networks
        *[
            c(f"conv{d}d", getattr(F, f"conv{d}d"), [x(3, 4, *[5] * d), w(6, 4, *[3] * d), w(6)])
            for d in (1, 2, 3)
        ],
        c(
            "conv groups",
            lambda a, b: F.conv2d(a, b, groups=2, stride=2, padding=1),
            [x(3, 4, 5, 5), w(6, 2, 3, 3)],
        ),
        c(
            "conv per record",
            lambda a, b: F.conv2d(a, b, groups=3),
            [x(1, 6, 5, 5, dim=1), x(9, 2, 3, 3)],
        ),
        c("conv transposed", F.conv_transpose2d, [x(3, 4, 5, 5), w(4, 6, 3, 3), w(6)]),
        c(
            "conv transposed groups",
            lambda a, b: F.conv_transpose1d(a, b, groups=2),
            [x(3, 4, 5), w(4, 3, 3)],
        ),
        c("conv one image", F.conv2d, [x(3, 5, 5, dim=None), w(6, 3, 3, 3)]),
        c("unfold fold", lambda a: F.fold(F.unfold(a, 2), (4, 4), 2), [x(3, 2, 4, 4)]),
        c("layer_norm", lambda a, b, d: F.layer_norm(a, (4,), b, d), [x(3, 2, 4), w(4), w(4)]),
        c("rms_norm", lambda a, b: F.rms_norm(a, (4,), b), [x(3, 2, 4), w(4)]),
        c("fused rms_norm", lambda a, b: aten._fused_rms_norm(a, [4], b, 1e-5), [x(3, 2, 4), w(4)]),
        c("group_norm", lambda a, b, d: F.group_norm(a, 2, b, d), [x(3, 4, 5), w(4), w(4)]),
        c("instance_norm", F.instance_norm, [x(3, 4, 5)]),
        c("batch_norm train", batch_norm(True), [x(3, 4), w(4), w(4)], apart=False),
        c("batch_norm eval", batch_norm(False), [x(3, 4, 2), w(4), w(4)]),
        c(
            "weight_norm",
            lambda v, g, a: a @ torch._weight_norm(v, g, 0).T,
            [w(5, 4), w(5, 1), x(3, 4)],
        ),
        *[
            c(f"{n}{d}d", lambda a, n=n, d=d: getattr(F, f"{n}{d}d")(a, 2), [x(3, 2, *[4] * d)])
            for n in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
            for d in (1, 2, 3)
        ],
        c("max_pool indices", lambda a: F.max_pool2d(a, 2, return_indices=True), [x(3, 2, 4, 4)]),
        c(
            "max_unpool",
            lambda a: F.max_unpool2d(*F.max_pool2d(a, 2, return_indices=True), 2),
            [x(3, 2, 4, 4)],
        ),
        c("lp_pool", lambda a: F.lp_pool2d(a, 2, 2), [x(3, 2, 4, 4)]),
        *[
            c(
                f"upsample {m}",
                lambda a, m=m: F.interpolate(a, scale_factor=2, mode=m),
                [x(3, 2, 3, 3)],
            )
            for m in ("nearest", "bilinear", "bicubic", "nearest-exact", "area")
        ],
        c(
            "upsample antialias",
            lambda a: F.interpolate(a, (2, 2), mode="bilinear", antialias=True),
            [x(3, 2, 4, 4)],
        ),
        c(
            "grid_sample",
            lambda a, g: F.grid_sample(a, g, align_corners=False),
            [x(3, 2, 4, 4), x(3, 3, 3, 2)],
        ),
        c(
            "affine_grid",
            lambda a: F.affine_grid(a, (3, 2, 4, 4), align_corners=False),
            [x(3, 2, 3)],
        ),
        c("sdpa", sdpa, [x(3, 2, 5, 8), x(3, 2, 5, 8), x(3, 2, 5, 8)]),
        c("sdpa mask", sdpa, [x(3, 2, 5, 8), x(3, 2, 5, 8), x(3, 2, 5, 8), x(3, 1, 5, 5)]),
        c("sdpa shared mask", sdpa, [x(3, 2, 5, 8), x(3, 2, 5, 8), x(3, 2, 5, 8), w(5, 5)]),
        c(
            "sdpa gqa",
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            [x(3, 4, 5, 8), x(3, 2, 5, 8), x(3, 2, 5, 8)],
        ),
        c(
            "flash cpu",
            lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v),
            [x(3, 2, 5, 8), x(3, 2, 5, 8), x(3, 2, 5, 8)],
        ),
        c("nll none", lambda a, t: F.nll_loss(a, t, reduction="none"), [x(3, 4), ids(4, 3)]),
        c("nll mean", F.nll_loss, [x(3, 4), ids(4, 3)], apart=False),
        c(
            "nll weighted",
            lambda a, t, v: F.nll_loss(a, t, v, reduction="none"),
            [x(3, 4), ids(4, 3), by_record(draw(4), None)],
            backward=False,
        ),
        c(
            "nll 2d",
            lambda a, t: F.nll_loss(a, t, reduction="none"),
            [x(3, 4, 2, 2), ids(4, 3, 2, 2)],
        ),
        c(
            "cross entropy smoothed",
            lambda a, t: F.cross_entropy(a, t, reduction="none", label_smoothing=0.1),
            [x(3, 4), ids(4, 3)],
        ),
        *[
            c(
                f"{n} {r}",
                lambda a, b, n=n, r=r: getattr(F, n)(
                    a.clamp(0, 1), b.clamp(0, 1).detach(), reduction=r
                ),
                [x(3, 4), x(3, 4)],
                apart=r == "none",
            )
            for n in (
                "mse_loss",
                "l1_loss",
                "smooth_l1_loss",
                "huber_loss",
                "binary_cross_entropy",
                "kl_div",
                "binary_cross_entropy_with_logits",
                "soft_margin_loss",
                "poisson_nll_loss",
            )
            for r in ("none", "mean")
        ],
        c(
            "multi_margin",
            lambda a, t: F.multi_margin_loss(a, t, reduction="none"),
            [x(3, 4), ids(4, 3)],
        ),
        c(
            "ctc",
            lambda a, t: F.ctc_loss(
                a.log_softmax(-1), t + 1, (5, 5, 5), (2, 2, 2), reduction="none"
            ),
            [x(5, 3, 4, dim=1), ids(3, 3, 2)],
        ),
        c("lstm", lstm(nn.LSTM, batch_first=True), [x(3, 6, 4)]),
        c("lstm seq first", lstm(nn.LSTM, num_layers=2, bidirectional=True), [x(6, 3, 4, dim=1)]),
        c("gru", lstm(nn.GRU, batch_first=True), [x(3, 6, 4)]),
        c("rnn", lstm(nn.RNN), [x(6, 3, 4, dim=1)]),
        *(
            c(
                f"scan {kind} {place}",
                scan(kind),
                [x(*p, dim=dim), x(*p[:2], 2, dim=dim)],
                apart,
                False,
            )
            for kind, gates in (("lstm", 4), ("gru", 3), ("tanh", 1), ("relu", 1))
            for place, p, dim, apart in (
                ("of records", (6, 3, 2 * gates), 1, True),
                ("with records in the place of moments", (3, 2, 2 * gates), 0, False),
            )
        ),
        c("fused lstm", fused_lstm, [x(6, 3, 2, dim=1)]),
        c("fused lstm with records as moments", fused_lstm, [x(3, 2, 2)], apart=False),
        c("detach", lambda a: a.detach() * 2, [x(3, 4)]),
    ]


CASES = cases()
