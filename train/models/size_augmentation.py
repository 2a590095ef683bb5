"""Size augmentation: random removal of vectors from sets, and of words from captions, during training."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

_MASKED, _CHANGED = 0.5, 0.6  # of the selected words, half are masked, a tenth are changed, and the others are removed


def some_of_sets(mask: Bool[Tensor, "n longest"], share: float) -> Bool[Tensor, "n longest"]:
    """Return the mask without a random ``share`` of its elements; at least one element of each set stays."""
    drawn = torch.rand(mask.shape, device=mask.device).masked_fill(~mask, -1)
    return mask & ((drawn >= share) | (drawn == drawn.amax(1, keepdim=True)))


class WordAugmentation(nn.Module):
    """Random masking, change and removal of words during training (VSE-infinity, Chen et al., CVPR 2021).

    A word is selected with the probability ``share``. Half of the selected words are replaced by the mask, a tenth by a random
    word, and the others are removed, as in the authors' code. The marks of the start and the end of a caption stay.

    Parameters
    ----------
    share : probability that a word is selected, in [0, 1[
    n_words : size of the vocabulary
    special : words that are never selected, and never replace another word
    masked : the word that replaces a masked word
    padding : the word that pads short captions
    continued : pieces that continue the word before them, and are treated as it is
    """

    special: Tensor
    continued: Tensor
    choices: Tensor

    def __init__(
        self,
        share: float,
        n_words: int,
        special: Iterable[int],
        masked: int,
        padding: int = 0,
        continued: Iterable[int] = (),
    ) -> None:
        super().__init__()
        self.share, self.masked, self.padding = share, masked, padding
        marks = torch.zeros(2, n_words, dtype=torch.bool)
        marks[0, list(special)] = True
        marks[1, list(continued)] = True
        others = (~marks[0]).nonzero()[:, 0]
        self.register_buffer("special", marks[0], persistent=False)
        self.register_buffer("continued", marks[1], persistent=False)
        self.register_buffer("choices", others if len(others) else torch.tensor([masked]), persistent=False)

    def forward(
        self, words: Int[Tensor, "n n_words"], mask: Bool[Tensor, "n n_words"]
    ) -> tuple[Int[Tensor, "n n_left"], Bool[Tensor, "n n_left"]]:
        """Return the remaining words without gaps, and their mask. No caption becomes empty. In evaluation nothing changes."""
        if not self.training or not self.share:
            return words, mask
        drawn = torch.rand(words.shape, device=words.device)
        drawn = drawn.gather(1, (~self.continued[words]).cumsum(1).sub(1).clamp(min=0)) / self.share
        may = mask & ~self.special[words]
        others = self.choices[torch.randint(len(self.choices), words.shape, device=words.device)]
        changed = torch.where(may & (drawn >= _MASKED) & (drawn < _CHANGED), others, words)
        changed = changed.masked_fill(may & (drawn < _MASKED), self.masked)
        kept = mask & ~(may & (drawn >= _CHANGED) & (drawn < 1))
        kept = kept | (mask & ~kept.any(1, keepdim=True))
        lengths = kept.sum(1)
        order = (~kept).byte().argsort(dim=1, stable=True)[:, : int(lengths.max())]
        left = torch.arange(order.shape[1], device=words.device) < lengths[:, None]
        return changed.gather(1, order).masked_fill(~left, self.padding), left
