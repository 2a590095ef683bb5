"""States of a GRU or LSTM on the processor: torch's arithmetic, laid out so that a backward pass costs less.

Torch adds up the gradient of the recurrent weights step by step, and projects every occurrence of a word. Here that gradient
is one product over all steps, and each word of a batch is projected once. Under autocast the products are
in bfloat16 and all else stays in float32. The rows of a product are rounded up, with rows that nobody reads or with zeros,
because for every new shape the library beneath torch compiles a kernel and keeps it.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

_FEW, _MANY = 16, 256  # rows of a step, and of all steps, are rounded up to multiples of these


def last_states(
    network: nn.GRU | nn.LSTM, table: Float[Tensor, "n_words word_dim"], words: PackedSequence
) -> Float[Tensor, "n dim"]:
    """The state of a one-layer ``network`` after each caption's last word, in the order in which captions were packed.

    Parameters
    ----------
    network : whose weights are used
    table : a vector per word
    words : packed word numbers
    """
    return last_of(packed_states(network, table, words), words)


def last_of(states: Float[Tensor, "n_packed dim"], words: PackedSequence) -> Float[Tensor, "n dim"]:
    """Of the states after each word, those after the last ones, in the order in which captions were packed."""
    starts, lengths = _layout(words)
    last = states[(starts[lengths - 1] + torch.arange(len(lengths))).to(states.device)]
    return last if words.unsorted_indices is None else last[words.unsorted_indices]


def packed_states(
    network: nn.GRU | nn.LSTM, table: Float[Tensor, "n_words word_dim"], words: PackedSequence, backwards: bool = False
) -> Float[Tensor, "n_packed dim"]:
    """The state of a one-layer ``network`` after each word, in the order of ``words.data``.

    With ``backwards`` it is the state of the second direction of a bidirectional network, which reads captions from their end.
    Other parameters are those of :func:`last_states`.
    """
    data, mirror = words.data, None
    if backwards:
        starts, lengths = _layout(words)
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


def _layout(words: PackedSequence) -> tuple[Int[Tensor, " longest"], Int[Tensor, " n"]]:
    """Where each step starts among packed words, and the lengths of captions, the longest first."""
    sizes = words.batch_sizes
    return sizes.cumsum(0) - sizes, (sizes[:, None] > torch.arange(int(sizes[0]))).sum(0)


class _Gru(torch.autograd.Function):
    """h' = (1 - z) n + z h, with r, z = sigmoid(x + W h + b) and n = tanh(x + r (W h + b)), gates in the order r, z, n.

    Captions are sorted by length, the longest first: the ``sizes[t]`` first of them have a word t.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, sizes: list[int], product: torch.dtype) -> Tensor:
        dim = weight.shape[1]
        exact = weight.dtype
        weight_t = weight.to(product).t()
        states = weight.new_zeros(_rounded(sizes[0], _FEW), dim)
        gates = weight.new_empty(len(inputs), 2 * dim)
        candidates, recurrent = weight.new_empty(len(inputs), dim), weight.new_empty(len(inputs), dim)
        before = torch.zeros(_rounded(len(inputs), _MANY), dim, dtype=product, device=weight.device)
        after = weight.new_empty(len(inputs), dim)
        start = 0
        for size in sizes:
            step = slice(start, start := start + size)
            state = states[:size]
            low = states[: _rounded(size, _FEW)].to(product)
            before[step] = low[:size]
            hidden = (low @ weight_t)[:size].to(exact).add_(bias)
            torch.add(inputs[step, : 2 * dim], hidden[:, : 2 * dim], out=gates[step]).sigmoid_()
            recurrent[step] = hidden[:, 2 * dim :]
            candidate = torch.mul(gates[step, :dim], recurrent[step], out=candidates[step])
            candidate.add_(inputs[step, 2 * dim :]).tanh_()
            states[:size] = torch.lerp(candidate, state, gates[step, dim:], out=after[step])
        ctx.save_for_backward(weight, gates, candidates, recurrent, before)
        ctx.sizes, ctx.inputs_dtype = sizes, inputs.dtype
        return after

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        weight, gates, candidates, recurrent, before = ctx.saved_tensors
        dim = weight.shape[1]
        of_state = weight.new_zeros(ctx.sizes[0], dim)
        of_gates = weight.new_zeros(len(before), 3 * dim)  # with respect to W h + b
        of_candidate = weight.new_empty(len(gates), dim)  # with respect to the input of tanh
        weight_low = weight.to(before.dtype)
        end = len(gates)
        for size in reversed(ctx.sizes):
            step = slice(end - size, end)
            end -= size
            gradient, reset, update = of_state[:size].add_(gradients[0][step]), gates[step, :dim], gates[step, dim:]
            candidate = candidates[step]
            kept = gradient * update
            torch.mul(gradient - kept, 1 - candidate.square(), out=of_candidate[step])
            torch.mul(of_candidate[step], reset, out=of_gates[step, 2 * dim :])
            torch.mul(of_gates[step, 2 * dim :] * recurrent[step], 1 - reset, out=of_gates[step, :dim])
            torch.mul(kept * (before[step] - candidate), 1 - update, out=of_gates[step, dim : 2 * dim])
            low = of_gates[end : end + _rounded(size, _FEW)].to(before.dtype)
            of_state[:size] = kept.add_((low @ weight_low)[:size])
        of_weight = (of_gates.to(before.dtype).t() @ before).to(weight.dtype)
        of_bias = of_gates.sum(0)
        of_inputs = of_gates[: len(gates)]
        of_inputs[:, 2 * dim :] = of_candidate
        return of_inputs.to(ctx.inputs_dtype), of_weight, of_bias, None, None


class _Lstm(torch.autograd.Function):
    """c' = f c + i g and h' = o tanh(c'), with i, f, o = sigmoid(x + W h + b), g = tanh(x + W h + b), in the order i, f, g, o.

    Captions are sorted as for the GRU.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, sizes: list[int], product: torch.dtype) -> Tensor:
        dim = weight.shape[1]
        exact = weight.dtype
        weight_t = weight.to(product).t()
        states = weight.new_zeros(_rounded(sizes[0], _FEW), dim)
        cell = weight.new_zeros(sizes[0], dim)
        gates = weight.new_empty(len(inputs), 4 * dim)
        cells, squashed = (
            weight.new_empty(len(inputs), dim),
            weight.new_empty(len(inputs), dim),
        )  # before a step, and after it
        before = torch.zeros(_rounded(len(inputs), _MANY), dim, dtype=product, device=weight.device)
        after = weight.new_empty(len(inputs), dim)
        start = 0
        for size in sizes:
            step = slice(start, start := start + size)
            low = states[: _rounded(size, _FEW)].to(product)
            before[step] = low[:size]
            hidden = (low @ weight_t)[:size].to(exact).add_(bias)
            gate = torch.add(inputs[step], hidden, out=gates[step])
            gate[:, : 2 * dim].sigmoid_()
            gate[:, 2 * dim : 3 * dim].tanh_()
            gate[:, 3 * dim :].sigmoid_()
            entering, forget, candidate, out = gate.chunk(4, 1)
            cells[step] = cell[:size]
            cell[:size].mul_(forget).addcmul_(entering, candidate)
            torch.tanh(cell[:size], out=squashed[step])
            states[:size] = torch.mul(out, squashed[step], out=after[step])
        ctx.save_for_backward(weight, gates, cells, squashed, before)
        ctx.sizes, ctx.inputs_dtype = sizes, inputs.dtype
        return after

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        weight, gates, cells, squashed, before = ctx.saved_tensors
        of_state, of_cell = weight.new_zeros(2, ctx.sizes[0], weight.shape[1])
        of_gates = weight.new_zeros(len(before), gates.shape[1])  # with respect to x + W h + b
        weight_low = weight.to(before.dtype)
        end = len(gates)
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
            low = of_gates[end : end + _rounded(size, _FEW)].to(before.dtype)
            of_state[:size] = (low @ weight_low)[:size]
        of_weight = (of_gates.to(before.dtype).t() @ before).to(weight.dtype)
        return of_gates[: len(gates)].to(ctx.inputs_dtype), of_weight, of_gates.sum(0), None, None


def _rounded(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple
