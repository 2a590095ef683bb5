"""The words of a phrase that an encoder reads: in lower case, and without stop words if they are to be dropped."""

from __future__ import annotations

from collections.abc import Sequence

# They say how a phrase stands in its sentence, not what it names. Numbers (two men), places (the front) and colours are none.
_CLASSES = (
    "a an the this that these those",
    "i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers herself",
    "it its itself they them their theirs themselves who whom whose which what",
    "of in on at to from with by for into onto upon as about and or but nor",
    "is are was were be been being am has have had having do does did doing",
    "some any each other another such own same so than too very",
)
STOP_WORDS = frozenset(word for words in _CLASSES for word in words.split(" "))


def phrase_words(tokens: Sequence[str], drop_stop_words: bool = False) -> tuple[str, ...]:
    """The words of a phrase as its encoder reads them; a phrase of stop words alone, such as *them*, keeps them.

    Plummer et al. remove stop words from phrases; their list is not published, so this is one of closed word classes.
    """
    words = tuple(token.lower() for token in tokens)
    return (tuple(word for word in words if word not in STOP_WORDS) or words) if drop_stop_words else words
