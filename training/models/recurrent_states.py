"""States of a GRU or LSTM on a CPU, with the arithmetic of torch and a cheaper backward pass.

Torch sums the gradient of the recurrent weights step by step, and multiplies every occurrence of a word by the input weights.
This module computes the gradient by one matrix product over all steps, and multiplies each different word of a batch once.
Under autocast the products are in bfloat16, the rest in float32.

The number of rows of some products is rounded up. In bfloat16, oneDNN compiles and keeps a kernel for each shape, so there
should be few shapes. In float32 without gradients, the product of a step has 16 rows for 1 to 16 captions, so its rounding
does not depend on the other captions. In float32 with gradients, it has one row for each caption.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

STEP_ROW_MULTIPLE = 16  # the number of rows of a step is rounded up to a multiple of this
_TOTAL_ROW_MULTIPLE = 256  # the same for the rows of all steps, and for the different words, in bfloat16
# Gradients with respect to the inputs of tanh and sigmoid, computed from their outputs.
_tanh_backward, _sigmoid_backward = torch.ops.aten.tanh_backward.grad_input, torch.ops.aten.sigmoid_backward.grad_input


def compute_last_states(
    network: nn.GRU | nn.LSTM, word_vectors: Float[Tensor, "n_words word_dim"], words: PackedSequence
) -> Float[Tensor, "n dim"]:
    """Return the state of a one-layer ``network`` after the last word of each caption.

    ``words`` are packed row indices of ``word_vectors``.
    """
    return select_last_states(compute_packed_states(network, word_vectors, words), words)


def unpack_states(packed: PackedSequence, longest: int | None = None) -> Float[Tensor, "n longest dim"]:
    """Return the states of packed captions as a padded matrix, in the order of the captions before packing.

    ``longest`` is the number of columns (None: the number of words of the longest caption). torch's own function also returns
    the lengths, so the CPU would wait for a GPU.
    """
    in_order = packed._replace(sorted_indices=None, unsorted_indices=None)
    states, _ = pad_packed_sequence(in_order, batch_first=True, total_length=longest)
    assert packed.unsorted_indices is not None
    return states.index_select(0, packed.unsorted_indices)


def select_last_states(states: Float[Tensor, "n_packed dim"], words: PackedSequence) -> Float[Tensor, "n dim"]:
    """Return the state after the last word of each caption, given the ``states`` after each packed word.

    Captions are in the order before packing.
    """
    starts, lengths = _find_step_starts_and_lengths(words)
    last = states[(starts[lengths - 1] + torch.arange(len(lengths))).to(states.device)]
    return last if words.unsorted_indices is None else last[words.unsorted_indices]


def compute_packed_states(
    network: nn.GRU | nn.LSTM, word_vectors: Float[Tensor, "n_words word_dim"], words: PackedSequence, backwards: bool = False
) -> Float[Tensor, "n_packed dim"]:
    """Return the state of a one-layer ``network`` after each packed word.

    ``words`` are packed row indices of ``word_vectors``. With ``backwards``, a bidirectional network reads from the last word.
    """
    data, mirror = words.data, None
    if backwards:
        starts, lengths = _find_step_starts_and_lengths(words)
        step = torch.repeat_interleave(torch.arange(len(starts)), words.batch_sizes)
        caption = torch.arange(len(data)) - starts[step]
        mirror = starts[lengths[caption] - 1 - step] + caption
        data = data[mirror]
    product_dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else word_vectors.dtype
    distinct, row_of_word = torch.unique(data, return_inverse=True)
    distinct = nn.functional.pad(distinct, (0, _round_up_total(len(distinct), product_dtype) - len(distinct)))
    input_weight, state_weight, input_bias, state_bias = network.all_weights[int(backwards)]
    projected = nn.functional.linear(word_vectors[distinct], input_weight, input_bias)
    inputs = nn.functional.embedding(row_of_word, projected)
    recurrence = _GruRecurrence if isinstance(network, nn.GRU) else _LstmRecurrence
    batch_sizes, with_gradients = words.batch_sizes.tolist(), torch.is_grad_enabled()
    states: Tensor = recurrence.apply(inputs, state_weight, state_bias, batch_sizes, product_dtype, with_gradients)
    return states if mirror is None else states[mirror]


def _find_step_starts_and_lengths(words: PackedSequence) -> tuple[Int[Tensor, " longest"], Int[Tensor, " n"]]:
    """Return, for packed captions, the index of the first word of each step, and the lengths of the captions, longest first.

    A step t consists of the t-th words of all captions that have at least t words.
    """
    sizes = words.batch_sizes
    return sizes.cumsum(0) - sizes, (sizes[:, None] > torch.arange(int(sizes[0]))).sum(0)


class _StepProducts:
    """A buffer ``rows`` with a row for each packed word, and the product of the rows of a step with a weight matrix.

    Step k consists of the rows of the k-th words of all captions. The caller writes these rows before :meth:`multiply` reads
    them. ``n`` is the number of rows of all steps, and ``max_step_rows`` the largest number of rows of a step.
    ``with_gradients`` is true if autograd is on.
    """

    def __init__(self, n: int, max_step_rows: int, weight: Float[Tensor, "n_in n_out"], with_gradients: bool) -> None:
        is_low = weight.dtype == torch.bfloat16
        self._row_multiple = 1 if with_gradients and not is_low else STEP_ROW_MULTIPLE
        self.rows = weight.new_empty(_round_up_total(n, weight.dtype) + STEP_ROW_MULTIPLE, len(weight))
        self.rows[n:] = 0
        # In float32, MKL multiplies few rows up to a third faster if the columns of the weights are contiguous.
        self._weight = weight if is_low else weight.t().contiguous().t()
        self._product = weight.new_empty(_round_up(max_step_rows, STEP_ROW_MULTIPLE), weight.shape[1])

    def multiply(self, step: slice) -> Float[Tensor, "size n_out"]:
        """Return the buffer's rows ``step``, multiplied by the weight matrix. The next call overwrites the result."""
        size = step.stop - step.start
        rows = _round_up(size, self._row_multiple)  # more rows are read, but the results for them are dropped
        return torch.mm(self.rows[step.start : step.start + rows], self._weight, out=self._product[:rows])[:size]

    def set_rows(self, step: slice, values: Float[Tensor, "n_rows n_in"]) -> None:
        """Copy the rows ``step`` of ``values`` to the buffer. If both have the same type, they must share their memory."""
        if values.dtype != self.rows.dtype:
            self.rows[step] = values[step]

    def add_product(self, step: slice, bias: Tensor, out: Float[Tensor, "size n_out"]) -> Float[Tensor, "size n_out"]:
        """Write the product of the buffer's rows ``step`` with the weight matrix, plus ``bias``, to ``out``. Return ``out``.

        In the first step only ``bias`` is written: the states before this step are 0, and so is the product.
        """
        return torch.add(self.multiply(step), bias, out=out) if step.start else out.copy_(bias)


class _GruRecurrence(torch.autograd.Function):
    """The states h' = (1 - z) n + z h of a GRU, with r, z = sigmoid(x + W h + b) and n = tanh(x + r (W h + b)).

    h is the state before a step, and h' the state after it. The gates r, z and n have separate parts of x, W and b, in this
    order. x is ``inputs``, the word vectors times the input weights. W is ``weight``, and b is ``bias``. Captions are sorted
    by length, the longest first: the first ``batch_sizes[t]`` captions have a word at step t. W h is computed in
    ``product_dtype``. ``with_gradients`` is true if autograd is on.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor,
        batch_sizes: list[int],
        product_dtype: torch.dtype,
        with_gradients: bool,
    ) -> Tensor:
        n, dim = len(inputs), weight.shape[1]
        low_weight = weight.to(product_dtype)
        states_before = _StepProducts(n, batch_sizes[0], low_weight.t(), with_gradients)
        gates = weight.new_empty(n, 3 * dim)  # r, z, and the hidden part of n, W h + b
        candidates, after = weight.new_empty(n, dim), weight.new_empty(n, dim)
        both_gates, both_inputs = gates[:, : 2 * dim], inputs[:, : 2 * dim]  # of r and z
        arrays = (gates, both_gates, both_inputs, *gates.chunk(3, 1), inputs[:, 2 * dim :], candidates, after)
        state, start = weight.new_zeros(batch_sizes[0], dim), 0
        for gate, r_and_z, x, r, z, hidden, x_n, candidate, new in _split_into_steps(batch_sizes, arrays):
            size = len(gate)
            step, state = slice(start, start := start + size), state[:size]
            states_before.rows[step] = state
            states_before.add_product(step, bias, out=gate)
            r_and_z.add_(x).sigmoid_()
            torch.mul(r, hidden, out=candidate).add_(x_n).tanh_()
            state = torch.lerp(candidate, state, z, out=new)
        ctx.save_for_backward(low_weight, gates, candidates, states_before.rows[: _round_up_total(n, product_dtype)])
        ctx.batch_sizes, ctx.inputs_dtype = batch_sizes, inputs.dtype
        return after

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        weight, gates, candidates, states_before = ctx.saved_tensors
        n, dim = candidates.shape
        of_hidden, of_gates = _allocate_gate_gradients(
            n, ctx.batch_sizes[0], weight, len(states_before), gates.dtype
        )  # with respect to W h + b
        of_candidate = torch.empty_like(candidates)  # with respect to the input of tanh
        arrays = (gradients[0], *gates.chunk(3, 1), candidates, states_before[:n], of_candidate, *of_gates[:n].chunk(3, 1))
        of_state, end = gates.new_zeros(ctx.batch_sizes[0], dim), n
        for of_after, r, z, hidden, candidate, before, of_n, of_r, of_z, of_h in reversed(
            _split_into_steps(ctx.batch_sizes, arrays)
        ):
            size = len(of_after)
            step, end = slice(end - size, end), end - size
            gradient = of_state[:size].add_(of_after)
            kept = gradient * z
            _tanh_backward(gradient - kept, candidate, grad_input=of_n)
            torch.mul(of_n, r, out=of_h)
            _sigmoid_backward(of_n * hidden, r, grad_input=of_r)
            _sigmoid_backward(gradient * (before - candidate), z, grad_input=of_z)
            of_hidden.set_rows(step, of_gates)
            if end:  # nothing depends on the first state
                torch.add(kept, of_hidden.multiply(step), out=gradient)
        of_weight = (of_hidden.rows[: len(states_before)].t() @ states_before).to(gates.dtype)
        of_bias = of_gates.sum(0)
        of_inputs = of_hidden.rows[:n]
        of_inputs[:, 2 * dim :] = of_candidate
        return of_inputs.to(ctx.inputs_dtype), of_weight, of_bias, None, None, None


class _LstmRecurrence(torch.autograd.Function):
    """The states h' = o tanh(c') of an LSTM, with c' = f c + i g.

    c and h are the cell and the state before a step, c' and h' those after it. The gates are i, f, o = sigmoid(x + W h + b)
    and g = tanh(x + W h + b), in the order i, f, g, o. The arguments have the same meaning as in :class:`_GruRecurrence`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor,
        batch_sizes: list[int],
        product_dtype: torch.dtype,
        with_gradients: bool,
    ) -> Tensor:
        n, dim = len(inputs), weight.shape[1]
        low_weight = weight.to(product_dtype)
        states_before = _StepProducts(n, batch_sizes[0], low_weight.t(), with_gradients)
        gates = weight.new_empty(n, 4 * dim)
        cells, squashed = weight.new_empty(2, n, dim).unbind()  # cells before a step, and their tanh after it
        after = weight.new_empty(n, dim)
        cell, state, start = weight.new_zeros(batch_sizes[0], dim), weight.new_zeros(batch_sizes[0], dim), 0
        for size in batch_sizes:
            step, cell = slice(start, start := start + size), cell[:size]
            states_before.rows[step] = state[:size]
            gate = states_before.add_product(step, bias, out=gates[step]).add_(inputs[step])
            gate[:, : 2 * dim].sigmoid_()
            gate[:, 2 * dim : 3 * dim].tanh_()
            gate[:, 3 * dim :].sigmoid_()
            entering, forget, candidate, out = gate.chunk(4, 1)
            cells[step] = cell
            cell.mul_(forget).addcmul_(entering, candidate)
            state = torch.mul(out, torch.tanh(cell, out=squashed[step]), out=after[step])
        ctx.save_for_backward(low_weight, gates, cells, squashed, states_before.rows[: _round_up_total(n, product_dtype)])
        ctx.batch_sizes, ctx.inputs_dtype = batch_sizes, inputs.dtype
        return after

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        weight, gates, cells, squashed, states_before = ctx.saved_tensors
        n, dim = cells.shape
        of_state, of_cell = gates.new_zeros(2, ctx.batch_sizes[0], dim)
        of_hidden, of_gates = _allocate_gate_gradients(
            n, ctx.batch_sizes[0], weight, len(states_before), gates.dtype
        )  # with respect to x + W h + b
        end = n
        for size in reversed(ctx.batch_sizes):
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
            of_hidden.set_rows(step, of_gates)
            if end:  # nothing depends on the first state
                of_state[:size] = of_hidden.multiply(step)
        of_weight = (of_hidden.rows[: len(states_before)].t() @ states_before).to(gates.dtype)
        return of_hidden.rows[:n].to(ctx.inputs_dtype), of_weight, of_gates.sum(0), None, None, None


def _split_into_steps(batch_sizes: list[int], arrays: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Return, for each step, a tuple with the rows of this step in each array. Arrays have a row for each packed word."""
    return list(zip(*(torch.split(array, batch_sizes) for array in arrays), strict=True))


def _allocate_gate_gradients(
    n: int, max_step_rows: int, weight: Tensor, n_rows: int, dtype: torch.dtype
) -> tuple[_StepProducts, Float[Tensor, "n_rows n_gates"]]:
    """Return two buffers for the gradients of the gates, each with a row for each of the ``n`` packed words.

    The first buffer has the type of ``weight``, and can multiply its rows by ``weight``. The second is a matrix of the type
    ``dtype``, filled up with zeros to ``n_rows`` rows. If both types are equal, the buffers share their memory.
    """
    products = _StepProducts(n, max_step_rows, weight, with_gradients=True)
    of_gates = products.rows[:n_rows]
    if dtype != weight.dtype:
        of_gates = torch.empty_like(of_gates, dtype=dtype)
        of_gates[n:] = 0
    return products, of_gates


def _round_up_total(rows: int, dtype: torch.dtype) -> int:
    return _round_up(rows, _TOTAL_ROW_MULTIPLE if dtype == torch.bfloat16 else STEP_ROW_MULTIPLE)


def _round_up(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple
