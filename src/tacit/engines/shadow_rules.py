"""How labels pass through an operator: tables of rules.

`_FAMILIES` names the operators that share a function. `_SIGNATURES` says in the manner of `einsum`
which elements meet in an output element: `mm` is "ik,kj->ij". Pointwise operators are found by the
tag that PyTorch gives them. An operator in no table is labelled by its decomposition (`shadow`).
Operators that read or write at positions given by a tensor are in `shadow_indexing`; what a rule
is, in `shadow_calls`.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache

import torch
from torch import Tensor

from tacit.engines.shadow_calls import RULES, Call, Labels, Rule, describe, flat, label_rule
from tacit.engines.shadow_labels import combine, reduce_labels
from tacit.pytrees import map_tensors
from tacit.torch_internals import schema_of


def find_rule(name: str) -> Rule | None:
    """The rule of an operator that need not be decomposed."""
    if name in RULES:
        return RULES[name]
    if _ON_PIXELS.fullmatch(name):
        dims = int(re.findall(r"([123])d", name)[0])
        return signature(f"B{'uvw'[:dims]}->B{'xyz'[:dims]}")
    return elementwise if _is_pointwise(name) else None


@cache
def _is_pointwise(name: str) -> bool:
    """Whether PyTorch itself tags an operator of ATen as pointwise."""
    packets = [getattr(torch.ops.aten, found, None) for found in (name, f"{name}_")]
    functions = [getattr(p, o) for p in packets if p is not None for o in p.overloads()]
    return any(torch.Tag.pointwise in function.tags for function in functions)


# --- families of operators ------------------------------------------------------------------------


def public(call: Call) -> Labels:
    """New memory with the shape of another tensor, or random draws."""
    return 0


def elementwise(call: Call) -> Labels:
    """Output element k depends on element k of each operand, after broadcasting."""
    return combine(*[call.labels(tensor) for tensor in call.reads() if call.private(tensor)])


def move(call: Call) -> Labels:
    """The operator moves elements and fills with zeros: run it on the labels."""

    def swap(tensor: Tensor) -> Tensor:
        labels = call.labels(tensor)
        return labels.clone() if schema_of(call.func).is_mutable else labels

    named = {name: value for name, value in call.kwargs.items() if name in call.read_names}
    args, named = map_tensors(swap, (list(call.args), named))
    moved = list(flat(call.func.overloadpacket(*args, **named)))
    if any(labels.dtype is not torch.int32 for labels in moved):
        raise ValueError("labels must stay numbers")
    return moved


def reduction(call: Call) -> Labels:
    """Each output depends on all elements along the reduced dimensions."""
    if call.name in ("max", "min") and "other" in call.arguments:
        return elementwise(call)
    dims = None if call.get("dim", []) == [] else call["dim"]
    reduced = reduce_labels(combine(*call.all()), dims, bool(call.get("keepdim", False)))
    if reduced.shape != call.output.shape:
        raise ValueError("an unexpected shape")
    return reduced


def along(call: Call) -> Labels:
    """Each output depends on all elements along one dimension; that dimension stays."""
    return reduce_labels(combine(*call.all()), call.get("dim", -1), keepdim=True)


def draws_by_value(call: Call) -> Labels:
    """Pointwise, but how many numbers are drawn depends on the data.

    The generator is shared: with the same seed, one record shifts what the others draw.
    """
    call.selects = True
    return elementwise(call)


_FAMILIES: dict[Rule, str] = {
    public: (
        "zeros_like ones_like empty_like rand_like randn_like randint_like full_like new_zeros "
        "new_empty new_ones new_full new_empty_strided zero uniform random exponential geometric "
        "cauchy log_normal normal_functional _efficientzerotensor _philox_normal "
        "_new_zeros_with_same_feature_meta _philox_uniform _cudnn_init_dropout_state"
    ),
    # Those that PyTorch does not tag as pointwise.
    elementwise: (
        "_to_copy copy fill lift_fresh_copy contiguous _copy_from _lazy_clone detach_copy "
        "_conj_copy _neg_view_copy floor_divide hardswish _masked_scale softshrink_backward "
        "hardshrink_backward _standard_gamma_grad normal polar _pin_memory dequantize _add_relu "
        "fill_diagonal __lshift__ __rshift__ __ilshift__ __irshift__ "
        "fake_quantize_per_tensor_affine_cachemask "
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams"
    ),
    draws_by_value: "poisson binomial _standard_gamma",
    move: (
        "cat stack _stack roll flip repeat tril triu rot90 native_channel_shuffle block_diag "
        "diag_embed slice_backward select_backward diagonal_backward select_scatter slice_scatter "
        "diagonal_scatter unsafe_split unsafe_split_with_sizes split_copy select_copy slice_copy "
        "_reshape_copy _chunk_cat"
    ),
    reduction: (
        "sum nansum mean max min amax amin aminmax var var_mean std std_mean prod any all argmax "
        "argmin median nanmedian mode kthvalue logsumexp linalg_vector_norm linalg__powsum norm "
        "count_nonzero dist hash_tensor"
    ),
    along: (
        "_softmax _log_softmax softmax log_softmax _safe_softmax _softmax_backward_data "
        "_log_softmax_backward_data cumsum cumprod cummax cummin logcumsumexp _logcumsumexp sort "
        "argsort topk multinomial linalg_cross _fft_c2c _fft_c2r _fft_r2c _sample_dirichlet "
        "_dirichlet_grad _cummax_helper _cummin_helper"
    ),
}
for _rule, _operators in _FAMILIES.items():
    label_rule(*_operators.split())(_rule)


# --- signatures -----------------------------------------------------------------------------------


def signature(text: str) -> Rule:
    """A rule from a signature such as "ik,kj->ij".

    There is one term for each tensor among the arguments and one for each output, and the last term
    of either side stands for all that follow. A letter is a dimension. An output element depends on
    the elements of an operand that have the same index in the dimensions that both name, whatever
    their index is in the others.

    - A capital letter is any number of dimensions, aligned at the last as in broadcasting; M, N
      and O have as many as `normalized_shape`.
    - (gc) is one dimension that is divided into groups, as in a convolution.
    - An operand with fewer dimensions than letters lacks the first ones, as in broadcasting.
    - "-" is an operand that is not read, or a public output.

    Where sizes of one letter differ, all elements along it are joined, which is always sound.
    """

    def rule(call: Call) -> Labels:
        if call.get("batch_sizes"):
            raise NotImplementedError("packed sequences in a fused recurrent layer")
        # The layers of oneDNN always get (time, records, width), whatever the flag says.
        records_first = call.get("batch_first") and "cudnn" in call.name
        terms = text.replace("tb", "bt").replace("ub", "bu") if records_first else text
        left, right = (side.split(",") for side in terms.split("->"))
        ranks = dict.fromkeys("MNO", len(call.get("normalized_shape", ())))
        fixed = tuple(ranks.items())
        groups = call.get("groups", call.get("group", 1))
        operands: list[tuple[Tensor, dict[str, int]]] = []
        parameters = [p for p in describe(call.func)[1] if p.is_tensor and p.is_read]
        for k, value in enumerate(call[parameter.name] for parameter in parameters):
            term = left[min(k, len(left) - 1)]
            for tensor in flat(value):
                if term == "-" or not isinstance(tensor, Tensor):
                    continue
                sizes = _parse(term, tensor.shape, fixed, groups)
                for letter in sizes:  # of public operands too, which may have more dimensions
                    if letter[0].isupper():
                        ranks[letter[0]] = max(ranks.get(letter[0], 0), int(letter[1:]))
                if call.private(tensor):
                    labels = call.labels(tensor) if sizes else reduce_labels(call.labels(tensor))
                    operands.append((labels.reshape(list(sizes.values())), sizes))
        bound = tuple(ranks.items())
        results: list[Tensor | int] = []
        for k, output in enumerate(call.outputs):
            term = right[min(k, len(right) - 1)]
            if output is None or term == "-":
                results.append(0)
                continue
            sizes = _parse(term, output.shape, bound, groups)
            joined = combine(*[_place(labels, own, sizes) for labels, own in operands])
            if "(" in term and sizes:
                joined = joined.expand(list(sizes.values())).reshape(output.shape)
            results.append(joined)
        return results

    return rule


@lru_cache(4096)
def _parse(
    term: str, shape: torch.Size, bound: tuple[tuple[str, int], ...], groups: int
) -> dict[str, int]:
    """The letter and size of each dimension; none where a term does not fit, to join everything.

    Dimensions of a capital letter are numbered from the right, and (gc) gives two letters.
    """
    ranks = dict(bound)
    tokens = re.findall(r"\(\w\w\)|\w", term)
    free = [token for token in tokens if token.isupper() and token not in ranks]
    rest = len(shape) - sum(ranks.get(token, 1) for token in tokens if token not in free)
    if rest < 0 and all(token.islower() for token in tokens):
        tokens, rest = tokens[-rest:], 0
    if len(free) > 1 or rest < 0 or (rest > 0 and not free):
        return {}
    found: dict[str, int] = {}
    remaining = iter(shape)
    for token in tokens:
        if token[0] == "(":
            found |= {token[1]: groups, token[2]: next(remaining) // groups}
        elif token.isupper():
            numbers = range(ranks.get(token, rest), 0, -1)
            found |= {f"{token}{number}": next(remaining) for number in numbers}
        else:
            found[token] = next(remaining)
    return found


def _place(labels: Tensor, own: dict[str, int], wanted: dict[str, int]) -> Tensor:
    """The labels of an operand, in the dimensions of an output."""
    joined = [k for k, (x, size) in enumerate(own.items()) if size not in (1, wanted.get(x))]
    labels = reduce_labels(labels, joined, keepdim=True)
    sizes = dict(zip(own, labels.shape, strict=True))
    assert [x for x in own if x in wanted] == [x for x in wanted if x in own]
    return labels.reshape([sizes.get(x, 1) for x in wanted])


_SIGNATURES = {
    # matrices
    "mm _int_mm": "ik,kj->ij",
    "bmm": "bik,bkj->bij",
    "addmm _addmm_activation": "ij,ik,kj->ij",
    "baddbmm": "bij,bik,bkj->bij",
    "addbmm": "ij,bik,bkj->ij",
    "mv": "ik,k->i",
    "addmv": "i,ik,k->i",
    "addr": "ij,i,j->ij",
    "dot vdot": "i,i->",
    "linear mkldnn_linear": "Bk,jk,j->Bj",
    "_cdist_forward _euclidean_dist": "Bik,Bjk->Bij",
    "_cdist_backward": "Bij,Bil,Bjl,Bij->Bik",
    "linalg_inv_ex linalg_cholesky_ex cholesky cholesky_inverse _linalg_svd _linalg_eigh linalg_qr "
    "_linalg_det _linalg_slogdet linalg_lu_factor_ex linalg_lu linalg_matrix_exp linalg_eig "
    "_linalg_eigvals linalg_solve_triangular triangular_solve _cholesky_solve_helper geqrf "
    "_linalg_solve_ex cholesky_solve linalg_ldl_factor_ex": "Bij->BZ",
    "linalg_householder_product lu_unpack": "Bij,Bk->BZ",
    "linalg_lu_solve linalg_ldl_solve": "Bij,Bk,Bij->BZ",
    "searchsorted": "Bk,Bv,Bk->Bv",
    # everything depends on everything
    "histc histogram _aminmax trace bincount native_norm _unique _unique2 unique_dim isin "
    "unique_consecutive unique_dim_consecutive _pdist_forward _pdist_backward segment_reduce "
    "_segment_reduce_backward embedding_renorm _weight_norm_interface_backward": "A->Z",
    # losses
    "multi_margin_loss_backward": "B,Bc,B,A->Bd",
    "multilabel_margin_loss_backward": "B,Bc->Bd",
    "_ctc_loss": "tnc,ns,nA->nZ",
    "_ctc_loss_backward": "n,tnc,ns,nA->xny",
    # networks
    "convolution _convolution cudnn_convolution mkldnn_convolution": "n(gc)A,(gw)B,(gk)->n(gk)Z",
    "convolution_backward": "n(gk)A,n(gc)B,(gw)C->n(gc)Z,(gw)Z,(gk)",
    "im2col col2im affine_grid_generator fractional_max_pool2d fractional_max_pool3d "
    "fractional_max_pool2d_backward fractional_max_pool3d_backward grid_sampler_2d_backward "
    "grid_sampler_3d_backward cudnn_grid_sampler_backward": "nA->nZ",
    "grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback cudnn_grid_sampler": (
        "ncA,nB->ncZ"
    ),
    "native_layer_norm _fused_rms_norm": "BM,N,N->BN,BO",
    "native_layer_norm_backward": "BM,BM,BO,BO,M->BN,Z",
    "_fused_rms_norm_backward": "BM,BM,BO,M->BN,Z",
    "native_dropout _fused_dropout": "R->R,-",
    # recurrence: every moment depends on others, so outputs have a time of their own; what is kept
    # for the backward pass is read by nothing else
    "tacit::recurrence": "tbg,bh,bh,A,A->ubo,bo,-",
    "tacit::recurrence_backward": "tbg,bh,bh,A,A,tbo,-,tbo,bh->ubx,by,by",
    "_thnn_fused_lstm_cell _thnn_fused_gru_cell": "bg,bg,bh,A,A->bz",
    "_thnn_fused_lstm_cell_backward_impl": "bg->bz,bz,z",
    "_thnn_fused_gru_cell_backward": "bg->bz,bz,bz,z",
    "mkldnn_rnn_layer": "tbi,A,A,A,A,Lbh->ubo,Lbh,Lbh,-",
    "mkldnn_rnn_layer_backward": (
        "tbi,A,A,A,A,Lbh,Lbh,tbo,Lbh,Lbh,tbo,Lbh,Lbh,-->ubi,Z,Z,Z,Z,Lbh,Lbh"
    ),
    "_cudnn_rnn": "tbi,A,-,Lbh,Lbh,-->ubo,Lbh,Lbh,-",
    "_cudnn_rnn_backward": "tbi,A,-,Lbh,Lbh,tbo,tbo,Lbh,Lbh,-->ubi,Lbh,Lbh,Z",
}
for _operators, _text in _SIGNATURES.items():
    label_rule(*_operators.split())(signature(_text))

_HEADS = "bhA,bhA,bhA"  # query, key and value are (records, heads, time, width)
_MASK = "bhqk"
_ATTENDED = "bhZ,bhZ,-,-,-,-,-,-,bhZ"  # output, log-sum, lengths and random state, probabilities
for _kind, _forward, _backward in (
    ("flash_attention", _HEADS, f"{_HEADS},bhA"),
    ("flash_attention_for_cpu", f"{_HEADS},{_MASK}", f"{_HEADS},{_HEADS},{_MASK}"),
    ("efficient_attention", f"{_HEADS},{_MASK}", f"{_HEADS},bhA,{_MASK},bhA"),
    ("cudnn_attention", f"{_HEADS},{_MASK}", f"{_HEADS},{_HEADS},-,-,{_MASK},-"),
    ("fused_attention_overrideable", f"{_HEADS},{_MASK}", f"{_HEADS},bhA,{_MASK},bhA"),
):
    label_rule(f"_scaled_dot_product_{_kind}")(signature(f"{_forward}->{_ATTENDED}"))
    label_rule(f"_scaled_dot_product_{_kind}_backward")(signature(f"{_backward}->bhZ"))

#: Pooling, resizing and the backward of padding keep apart everything but the pixels.
_ON_PIXELS = re.compile(
    r"_?(adaptive_)?(avg|max)_(un)?pool[123]d(_with_indices)?(_backward)?"
    r"|_?upsample_\w+[123]d(_aa)?(_backward)?|(reflection|replication)_pad[123]d_backward"
)


# --- operators whose signature depends on their arguments -----------------------------------------


@label_rule("native_group_norm", "native_group_norm_backward")
def _group_norm(call: Call) -> Labels:
    shape = call["input"].shape
    if (call["N"], call["C"], call["HxW"]) != (*shape[:2], shape[2:].numel()):
        raise NotImplementedError("sizes that are not those of the input")
    if "backward" in call.name:
        return signature("n(gd)A,n(gd)A,ng,ng,(gd)->n(gc)Z,(gc)")(call)
    return signature("n(gd)A,(gc),(gc)->n(gc)Z,ng")(call)


@label_rule("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm")
def _batch_norm(call: Call) -> Labels:
    training = call.get("training", not call.name.endswith("no_training"))
    # The fourth output is scratch memory that only this operator's backward reads.
    results = signature("mcA,c,c,-->ncB,c,c,-" if training else "ncR,c->ncR,-")(call)
    assert isinstance(results, list)
    for name in ("running_mean", "running_var"):
        if isinstance(call.get(name), Tensor):
            call.write(call[name], combine(call.need(name), results[1] if training else None))
    return results


label_rule("miopen_batch_norm", "_native_batch_norm_legit_no_training")(_batch_norm)
# Without running statistics the second one uses those of the batch too.
label_rule("_batch_norm_with_update", "_batch_norm_no_update")(_batch_norm)


@label_rule("_grouped_mm")
def _grouped_mm(call: Call) -> Labels:
    # `offs` only says where one group of rows ends: which weight a row meets is a selection.
    call.selects = call.selects or call.private(call.get("offs"))
    if call["self"].dim() == 2 and call["mat2"].dim() == 3:
        return signature("rk,Gkn,-,n->rn")(call)
    return call.whole()


@label_rule("_trilinear")
def _trilinear(call: Call) -> Labels:
    operands = [call.need("i1"), call.need("i2"), call.need("i3")]
    for k in range(3):
        for dim in sorted(call[f"expand{k + 1}"]):
            operands[k] = operands[k].unsqueeze(dim)
    joined = combine(*operands)
    return reduce_labels(joined, call["sumdim"]) if call["sumdim"] else joined


@label_rule("constant_pad_nd")
def _pad(call: Call) -> Labels:
    return torch.constant_pad_nd(call.need("self"), call["pad"], 0)


@label_rule("bernoulli")
def _bernoulli(call: Call) -> Labels:
    if "p" in call.arguments:  # the other tensor only gives the shape
        return combine(call.of("p"))
    return call.need("self")


@label_rule("rrelu_with_noise")
def _rrelu(call: Call) -> Labels:
    labels = call.need("self")
    call.selects = bool(call["training"])
    call.write(call["noise"], labels)
    return labels
