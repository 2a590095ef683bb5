"""States of a GRU or LSTM on a CPU, with the arithmetic of torch and a cheaper backward pass.

Torch sums the gradient of the recurrent weights step by step, and multiplies every occurrence of a word by the input weights.
Here that gradient is one matrix product over all steps, and each different word of a batch is multiplied once. Under autocast
the products are in bfloat16, the rest in float32. Rows of products are padded to few sizes, because oneDNN compiles and keeps
a kernel for every new shape.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

_FEW, _MANY = 16, 256  # the rows of a step, and of all steps, are rounded up to multiples of these


def last_states(
    network: nn.GRU | nn.LSTM, table: Float[Tensor, "n_words word_dim"], words: PackedSequence
) -> Float[Tensor, "n dim"]:
    """Return the state of a one-layer ``network`` after the last word of each caption; ``table`` has the word vectors."""
    return last_of(packed_states(network, table, words), words)


def last_of(states: Float[Tensor, "n_packed dim"], words: PackedSequence) -> Float[Tensor, "n dim"]:
    """Select from ``states``, which follow each packed word, the state after the last word of each caption.

    Captions are in the order before packing.
    """
    starts, lengths = _starts_and_lengths(words)
    last = states[(starts[lengths - 1] + torch.arange(len(lengths))).to(states.device)]
    return last if words.unsorted_indices is None else last[words.unsorted_indices]


def packed_states(
    network: nn.GRU | nn.LSTM, table: Float[Tensor, "n_words word_dim"], words: PackedSequence, backwards: bool = False
) -> Float[Tensor, "n_packed dim"]:
    """Return the state of a one-layer ``network`` after each packed word. ``table`` has the vector of every word.

    With ``backwards`` these are the states of the second direction of a bidirectional network.
    """
    data, mirror = words.data, None
    if backwards:
        starts, lengths = _starts_and_lengths(words)
        step = torch.repeat_interleave(torch.arange(len(starts)), words.batch_sizes)
        caption = torch.arange(len(data)) - starts[step]
        mirror = starts[lengths[caption] - 1 - step] + caption
        data = data[mirror]
    different, which = torch.unique(data, return_inverse=True)
    different = nn.functional.pad(different, (0, -len(different) % _MANY))
    of_input, of_state, input_bias, state_bias = network.all_weights[int(backwards)]
    projected = nn.functional.linear(table[different], of_input, input_bias)
    inputs = nn.functional.embedding(which, projected)
    precise = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else table.dtype
    recurrence = _Gru if isinstance(network, nn.GRU) else _Lstm
    states: Tensor = recurrence.apply(inputs, of_state, state_bias, words.batch_sizes.tolist(), precise)
    return states if mirror is None else states[mirror]


def _starts_and_lengths(words: PackedSequence) -> tuple[Int[Tensor, " longest"], Int[Tensor, " n"]]:
    """Return the index of the first packed word of each step, and the lengths of captions, the longest first."""
    sizes = words.batch_sizes
    return sizes.cumsum(0) - sizes, (sizes[:, None] > torch.arange(int(sizes[0]))).sum(0)


class _Factor:
    """The rows of all steps that are multiplied, one step after the other, by the same matrix ``weight``.

    There are ``n`` rows, at most ``most`` in a step. The caller writes the ``rows`` of a step before they are multiplied. Rows
    of zeros follow at the end.
    """

    def __init__(self, n: int, most: int, weight: Float[Tensor, "n_in n_out"]) -> None:
        self.rows = weight.new_zeros(_round_up(n, _MANY) + _FEW, len(weight))
        self._weight, self._product = weight, weight.new_empty(_round_up(most, _FEW), weight.shape[1])

    def multiply(self, step: slice) -> Float[Tensor, "size n_out"]:
        """Return the product of the rows in the slice ``step`` and the weight. The next call overwrites the result."""
        size = step.stop - step.start
        rows = _round_up(size, _FEW)
        return torch.mm(self.rows[step.start : step.start + rows], self._weight, out=self._product[:rows])[:size]


class _Gru(torch.autograd.Function):
    """GRU: h' = (1 - z) n + z h, with r, z = sigmoid(x + W h + b) and n = tanh(x + r (W h + b)), gates in the order r, z, n.

    x is the word vector times the input weights. Captions are sorted by length, the longest first: the first ``sizes[t]``
    captions have a word at step t.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, sizes: list[int], product: torch.dtype) -> Tensor:
        n, dim = len(inputs), weight.shape[1]
        low_weight = weight.to(product)
        before = _Factor(n, sizes[0], low_weight.t())
        gates = weight.new_empty(n, 3 * dim)  # r, z, and W h + b of the candidate
        candidates, after = weight.new_empty(n, dim), weight.new_empty(n, dim)
        state, start = weight.new_zeros(sizes[0], dim), 0
        for size in sizes:
            step, state = slice(start, start := start + size), state[:size]
            before.rows[step] = state
            gate = torch.add(before.multiply(step), bias, out=gates[step])
            gate[:, : 2 * dim].add_(inputs[step, : 2 * dim]).sigmoid_()
            reset, update, recurrent = gate.chunk(3, 1)
            candidate = torch.mul(reset, recurrent, out=candidates[step])
            candidate.add_(inputs[step, 2 * dim :]).tanh_()
            state = torch.lerp(candidate, state, update, out=after[step])
        ctx.save_for_backward(low_weight, gates, candidates, before.rows[: _round_up(n, _MANY)])
        ctx.sizes, ctx.inputs_dtype = sizes, inputs.dtype
        return after

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        weight, gates, candidates, before = ctx.saved_tensors
        n, dim = candidates.shape
        of_state = gates.new_zeros(ctx.sizes[0], dim)
        of_hidden, of_gates = _allocate_gradients(n, ctx.sizes[0], weight, before, gates.dtype)  # with respect to W h + b
        of_candidate = torch.empty_like(candidates)  # with respect to the input of tanh
        end = n
        for size in reversed(ctx.sizes):
            step = slice(end - size, end)
            end -= size
            gradient, candidate = of_state[:size].add_(gradients[0][step]), candidates[step]
            reset, update, recurrent = gates[step].chunk(3, 1)
            of_reset, of_update, of_recurrent = of_gates[step].chunk(3, 1)
            kept = gradient * update
            torch.mul(gradient - kept, 1 - candidate.square(), out=of_candidate[step])
            torch.mul(of_candidate[step], reset, out=of_recurrent)
            torch.mul(of_recurrent * recurrent, 1 - reset, out=of_reset)
            torch.mul(kept * (before[step] - candidate), 1 - update, out=of_update)
            of_hidden.rows[step] = of_gates[step]
            torch.add(kept, of_hidden.multiply(step), out=gradient)
        of_weight = (of_hidden.rows[: len(before)].t() @ before).to(gates.dtype)
        of_bias = of_gates.sum(0)
        of_inputs = of_hidden.rows[:n]
        of_inputs[:, 2 * dim :] = of_candidate
        return of_inputs.to(ctx.inputs_dtype), of_weight, of_bias, None, None


class _Lstm(torch.autograd.Function):
    """LSTM: c' = f c + i g and h' = o tanh(c'), gates in the order i, f, g, o.

    i, f, o = sigmoid(x + W h + b) and g = tanh(x + W h + b). Captions are sorted as for the GRU.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, sizes: list[int], product: torch.dtype) -> Tensor:
        n, dim = len(inputs), weight.shape[1]
        low_weight = weight.to(product)
        before = _Factor(n, sizes[0], low_weight.t())
        gates = weight.new_empty(n, 4 * dim)
        cells, squashed = weight.new_empty(2, n, dim).unbind()  # cells before a step, and their tanh after it
        after = weight.new_empty(n, dim)
        cell, state, start = weight.new_zeros(sizes[0], dim), weight.new_zeros(sizes[0], dim), 0
        for size in sizes:
            step, cell = slice(start, start := start + size), cell[:size]
            before.rows[step] = state[:size]
            gate = torch.add(before.multiply(step), bias, out=gates[step]).add_(inputs[step])
            gate[:, : 2 * dim].sigmoid_()
            gate[:, 2 * dim : 3 * dim].tanh_()
            gate[:, 3 * dim :].sigmoid_()
            entering, forget, candidate, out = gate.chunk(4, 1)
            cells[step] = cell
            cell.mul_(forget).addcmul_(entering, candidate)
            state = torch.mul(out, torch.tanh(cell, out=squashed[step]), out=after[step])
        ctx.save_for_backward(low_weight, gates, cells, squashed, before.rows[: _round_up(n, _MANY)])
        ctx.sizes, ctx.inputs_dtype = sizes, inputs.dtype
        return after

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        weight, gates, cells, squashed, before = ctx.saved_tensors
        n, dim = cells.shape
        of_state, of_cell = gates.new_zeros(2, ctx.sizes[0], dim)
        of_hidden, of_gates = _allocate_gradients(n, ctx.sizes[0], weight, before, gates.dtype)  # with respect to x + W h + b
        end = n
        for size in reversed(ctx.sizes):
            step = slice(end - size, end)
            end -= size
            entering, forget, candidate, out = gates[step].chunk(4, 1)
            of_entering, of_forget, of_candidate, of_out = of_gates[step].chunk(4, 1)
            of_state[:size].add_(gradients[0][step])
            torch.mul(of_state[:size] * squashed[step], out * (1 - out), out=of_out)
            through = of_cell[:size].addcmul_(of_state[:size] * out, 1 - squashed[step].square())
            torch.mul(through * candidate, entering * (1 - entering), out=of_entering)
            torch.mul(through * cells[step], forget * (1 - forget), out=of_forget)
            torch.mul(through * entering, 1 - candidate.square(), out=of_candidate)
            through.mul_(forget)
            of_hidden.rows[step] = of_gates[step]
            of_state[:size] = of_hidden.multiply(step)
        of_weight = (of_hidden.rows[: len(before)].t() @ before).to(gates.dtype)
        return of_hidden.rows[:n].to(ctx.inputs_dtype), of_weight, of_gates.sum(0), None, None


def _allocate_gradients(
    n: int, most: int, weight: Tensor, before: Tensor, exact: torch.dtype
) -> tuple[_Factor, Float[Tensor, "n_rows n_gates"]]:
    """Return memory for the gradients of the gates: in the type of matrix products, and in the type ``exact``.

    Both are the same memory if the types are equal.
    """
    factor = _Factor(n, most, weight)
    of_gates = factor.rows[: len(before)]
    if exact != weight.dtype:
        of_gates = torch.empty_like(of_gates, dtype=exact)
        of_gates[n:] = 0
    return factor, of_gates


def _round_up(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple
