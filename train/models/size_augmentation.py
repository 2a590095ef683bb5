"""Size augmentation: in training, sets lose some of their vectors and captions some of their words, at random."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

_MASKED, _CHANGED = 0.5, 0.6  # of the words that are drawn, half are masked, a tenth are changed, and the others are left out


def some_of_sets(mask: Bool[Tensor, "n longest"], share: float) -> Bool[Tensor, "n longest"]:
    """The mask without this share of what it has, drawn at random; the luckiest of each set stays."""
    drawn = torch.rand(mask.shape, device=mask.device).masked_fill(~mask, -1)
    return mask & ((drawn >= share) | (drawn == drawn.amax(1, keepdim=True)))


class WordAugmentation(nn.Module):
    """Captions some of whose words are masked, changed or left out, in training alone (VSE-infinity, Chen et al., CVPR 2021).

    A word is drawn with the probability ``share``. Of those drawn half become the mask, a tenth a random word, and the others
    are left out, as in the authors' code. What marks the start and the end of a caption stays.

    Parameters
    ----------
    share : of the words, in [0, 1[
    n_words : how many words there are
    special : words that are never drawn, nor drawn for another
    masked : the word that stands for a masked one
    padding : the word that fills short captions up
    continued : words that go on with the one before them, and share its fate, as pieces of a word do
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
        """The words that are left, without gaps, and their mask; as they were in evaluation. No caption becomes empty."""
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
