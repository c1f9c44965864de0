"""Parts of a block besides: residual sums, activation, attention."""

from __future__ import annotations

import torch
from torch import Tensor

from megasdc.sdc.exhibits.calls import Call, Exhibit, rows_as_matrix, taken
from megasdc.sdc.fp64.attention import attended, rotated
from megasdc.sdc.fp64.attention_gradients import Off, elements, given, head_gradients, summed, unrotated
from megasdc.sdc.fp64.rounding_bounds import Exact, activated, activated_input, residual

SLOTS = ("query", "key", "value")
"""Inputs of attention, in the order of its gradients."""


def sum_output(call: Call, result: Tensor) -> Exhibit:
    """Residual + mask (branch + bias)."""
    (branch, bias), other = call.args[0], call.args[1]
    parts = [None if one is None else rows_as_matrix(one) for one in (branch, call.mask, other)]

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        own, mask, rest = (None if one is None else taken(one, rows, columns) for one in parts)
        assert own is not None, "there is a branch"
        return residual(own, None if bias is None else taken(bias, columns), mask, rest, result.dtype)

    factors = (*parts, bias)
    return Exhibit(rows_as_matrix(result), tuple(one for one in factors if one is not None), compute)


def sum_input(call: Call, result: Tensor) -> Exhibit:
    """The mask times the gradient."""
    gradient, mask = rows_as_matrix(call.gradients[-1]), None if call.mask is None else rows_as_matrix(call.mask)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        kept = None if mask is None else taken(mask, rows, columns)
        return residual(taken(gradient, rows, columns), None, kept, None, result.dtype)

    return Exhibit(rows_as_matrix(result), (gradient,) if mask is None else (gradient, mask), compute)


def activation_output(call: Call, result: Tensor) -> Exhibit:
    """Of the layer before it, whose bias is added here; where it is gated, its first half is the gate."""
    layer, config = call.module, call.module.config
    assert call.output is not None, "it is a linear layer"
    given, bias = rows_as_matrix(call.output), layer.bias
    half = given.shape[-1] // 2 if config.gated_linear_unit else None

    def part(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor | None]:
        return taken(given, rows, columns), None if bias is None else taken(bias, columns)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        return activated(
            config.activation_func,
            *part(rows, columns),
            None if half is None else part(rows, columns + half),
            result.dtype,
            clamp=getattr(config, "activation_func_clamp_value", None),
            offset=getattr(config, "glu_linear_offset", 0.0),
        )

    return Exhibit(rows_as_matrix(result), (given,) if bias is None else (given, bias), compute)


def activation_input(call: Call, result: Tensor) -> Exhibit | None:
    """Of the layer before it, whose output's gradient this is; None: where it is clamped or has an offset."""
    layer, config = call.module, call.module.config
    if getattr(config, "activation_func_clamp_value", None) is not None or getattr(config, "glu_linear_offset", 0) != 0:
        return None
    assert call.output is not None, "it is a linear layer"
    given_output, bias, slopes = rows_as_matrix(call.output), layer.bias, rows_as_matrix(call.gradients[-1])
    half = given_output.shape[-1] // 2 if config.gated_linear_unit else None
    steps = config.activation_func is torch.nn.functional.relu

    def part(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor | None]:
        return taken(given_output, rows, columns), None if bias is None else taken(bias, columns)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        if half is None:
            gate = part(rows, columns)
            slope = taken(slopes, rows, columns)
            return activated_input(config.activation_func, slope, *gate, None, result.dtype, steps=steps)
        first = columns % half
        gate, linear, slope = part(rows, first), part(rows, first + half), taken(slopes, rows, first)
        of_gate = activated_input(config.activation_func, slope, *gate, linear, result.dtype, steps=steps)
        of_linear = activated(config.activation_func, *gate, (slope, None), result.dtype)
        is_gate = columns < half
        return Exact(
            torch.where(is_gate, of_gate.values, of_linear.values),
            torch.where(is_gate, of_gate.bounds, of_linear.bounds),
        )

    factors = (given_output, slopes)
    return Exhibit(rows_as_matrix(result), factors if bias is None else (*factors, bias), compute)


def attention_output(call: Call, result: Tensor) -> Exhibit:
    """Rows of heads."""
    module, (query, key, value) = call.module, call.args[:3]
    batch, heads, width = query.shape[1], query.shape[2], value.shape[3]
    shared = heads // key.shape[2]
    turn = _rotation(call)

    def seen(tensor: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Of tokens, [T, d], rotated where the module does that."""
        tokens = tensor.cpu()
        if turn is None:
            return tokens.double(), torch.zeros_like(tokens, dtype=torch.float64)
        cosine, sine = (one[first:end] for one in turn)
        return rotated(tokens, cosine, sine, query.dtype)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        values, bounds = torch.zeros(2, len(rows), dtype=torch.float64)
        for row, head in sorted({(int(r), int(c) // width) for r, c in zip(rows, columns, strict=True)}):
            token, sample, group = row // batch, row % batch, head // shared
            here = (rows == row) & (columns // width == head)
            asked = seen(query[token : token + 1, sample, head], token, token + 1)
            keys = seen(key[: token + 1, sample, group], 0, token + 1)
            wanted = value[: token + 1, sample, group].cpu()[:, columns[here] % width]
            mask = None if call.mask is None else call.mask[sample, head, token, : token + 1].cpu()
            found = attended((asked[0][0], asked[1][0]), keys, wanted, module.scale, result.dtype, mask)
            values[here], bounds[here] = found.values, found.bounds
        return Exact(values, bounds)

    return Exhibit(rows_as_matrix(result), (query, key, value, *_masks(call)), compute)


def attention_input(call: Call, result: Tensor, slot: str) -> Exhibit:
    """The gradient of ``slot``, one of query, key and value."""
    module, (query, key, value) = call.module, call.args[:3]
    batch, own_heads = query.shape[1], result.shape[2]
    shared = query.shape[2] // key.shape[2]
    slopes = call.gradients[-1].reshape(*query.shape[:3], value.shape[3])
    turn, kind, place = _rotation(call), result.dtype, SLOTS.index(slot)

    def asked(tensor: Tensor, sample: int, head: int) -> Off:
        tokens = tensor[:, sample, head].cpu()
        return given(tokens) if turn is None else Off(*rotated(tokens, *turn, kind))

    def of_head(sample: int, head: int) -> Off:
        """Of all tokens of one head of the result; key and value have those of all queries that share it."""
        queries = [head] if slot == "query" else range(head * shared, (head + 1) * shared)
        parts = [
            head_gradients(
                asked(query, sample, one),
                asked(key, sample, one // shared),
                value[:, sample, one // shared].cpu(),
                slopes[:, sample, one].cpu(),
                module.scale,
                kind,
                None if call.mask is None else call.mask[sample, one].cpu(),
            )[place]
            for one in queries
        ]
        total = summed(parts, kind)
        return total if turn is None or slot == "value" else unrotated(total.rounded(kind, 2), *turn, kind)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        values, bounds = torch.zeros(2, len(rows), dtype=torch.float64)
        tokens, samples, heads = rows // (batch * own_heads), rows // own_heads % batch, rows % own_heads
        for sample, head in sorted(set(zip(samples.tolist(), heads.tolist(), strict=True))):
            here = (samples == sample) & (heads == head)
            found = elements(of_head(sample, head), tokens[here], columns[here], kind)
            values[here], bounds[here] = found.values, found.bounds
        return Exact(values, bounds)

    return Exhibit(rows_as_matrix(result), (query, key, value, slopes, *_masks(call)), compute)


def _masks(call: Call) -> tuple[Tensor, ...]:
    return () if call.mask is None else (call.mask,)


def _rotation(call: Call) -> tuple[Tensor, Tensor] | None:
    """Cosine and sine of each token, [T, d]; None: nothing is rotated."""
    module = call.module
    if module.rotation is None:
        return None
    cosine, sine = (one[:, 0, 0].cpu() for one in module.rotation(call.args[0]))
    return cosine, sine
