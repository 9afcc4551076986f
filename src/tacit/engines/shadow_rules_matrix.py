"""Rules of matrix products, decompositions and distances."""

from __future__ import annotations

from torch import Tensor

from tacit.engines.shadow_labels import combine, fit_labels, reduce_labels
from tacit.engines.shadow_rules import Call, Labels, label_rule, register


@label_rule("mm", "bmm", "_int_mm")
def _matmul(call: Call) -> Labels:
    left, right = call.all()
    return combine(reduce_labels(left, -1, True), reduce_labels(right, -2, True))


@label_rule("addmm", "baddbmm", "addbmm", "_addmm_activation")
def _addmm(call: Call) -> Labels:
    base, left, right = call.all()
    product = combine(reduce_labels(left, -1, True), reduce_labels(right, -2, True))
    return combine(base, reduce_labels(product, 0) if call.name == "addbmm" else product)


@label_rule("mv", "addmv")
def _mv(call: Call) -> Labels:
    *base, matrix, vector = call.all()
    return combine(*base, reduce_labels(matrix, -1), reduce_labels(vector))


@label_rule("addr")
def _addr(call: Call) -> Labels:
    return combine(call.need("self"), call.need("vec1").unsqueeze(1), call.need("vec2"))


@label_rule("linear", "mkldnn_linear")
def _linear(call: Call) -> Labels:
    rows = reduce_labels(call.labels(call.reads()[0]), -1, keepdim=True)
    return combine(rows, reduce_labels(call.need("weight"), -1), call.of("bias"))


@label_rule("_trilinear")
def _trilinear(call: Call) -> Labels:
    operands = []
    for name, expand in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        labels = call.need(name)
        for dim in sorted(call[expand]):
            labels = labels.unsqueeze(dim)
        operands.append(labels)
    joined = combine(*operands)
    return reduce_labels(joined, call["sumdim"]) if call["sumdim"] else joined


@label_rule("_grouped_mm")
def _grouped_mm(call: Call) -> Labels:
    # `offs` only says where one group of rows ends: which weight a row meets is a selection.
    call.selects = call.selects or call.private(call.get("offs"))
    rows, weights = call.need("self"), call.need("mat2")
    if rows.dim() == 2 and weights.dim() == 3:
        return combine(
            reduce_labels(rows, -1, True), reduce_labels(weights, (0, 1)), call.of("bias")
        )
    return call.whole()


def matrices(call: Call) -> Labels:
    """Decompositions and solvers: each matrix of the batch by itself."""
    joined = combine(*[reduce_labels(labels, (-2, -1)) for labels in call.all()])
    results: list[Tensor | int | None] = []
    for output in call.outputs:
        if output is None:
            results.append(None)
            continue
        if tuple(output.shape[: joined.dim()]) != tuple(joined.shape):
            raise ValueError("an unexpected batch shape")
        trailing = output.dim() - joined.dim()
        results.append(joined.reshape(*joined.shape, *[1] * trailing))
    return results


register(
    matrices,
    "linalg_inv_ex linalg_cholesky_ex cholesky cholesky_inverse _linalg_svd _linalg_eigh "
    "linalg_qr _linalg_det _linalg_slogdet linalg_lu_factor_ex linalg_lu linalg_matrix_exp "
    "linalg_eig _linalg_eigvals linalg_solve_triangular triangular_solve "
    "linalg_householder_product _cholesky_solve_helper geqrf",
)


@label_rule("_linalg_solve_ex")
def _solve(call: Call) -> Labels:
    matrix, right = call.need("A"), call.need("B")
    if right.dim() != matrix.dim():
        raise ValueError("a batch of vectors")
    return matrices(call)


@label_rule("_cdist_forward")
def _cdist(call: Call) -> Labels:
    rows = reduce_labels(call.need("x1"), -1).unsqueeze(-1)
    columns = reduce_labels(call.need("x2"), -1).unsqueeze(-2)
    return combine(rows, columns)


@label_rule("_euclidean_dist")
def _euclidean(call: Call) -> Labels:
    return _cdist(call)


@label_rule("_cdist_backward")
def _cdist_backward(call: Call) -> Labels:
    rows = [reduce_labels(call.need(name), -1, True) for name in ("grad", "x1", "cdist")]
    joined = combine(*rows, reduce_labels(call.need("x2"), (-2, -1), True))
    return fit_labels(joined, call.output.shape)


@label_rule("linalg_lu_solve", "linalg_ldl_solve")
def _lu_solve(call: Call) -> Labels:
    matrix = call.need("LU" if call.name == "linalg_lu_solve" else "LD")
    pivots = reduce_labels(call.need("pivots"), -1)
    operands = [reduce_labels(labels, (-2, -1)) for labels in (matrix, call.need("B"))]
    return combine(pivots, *operands)[..., None, None]
