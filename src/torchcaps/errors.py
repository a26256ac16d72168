"""The one error and the one warning that a person, not a programmer, is meant to read."""

import difflib
from collections.abc import Iterable


class BadInput(ValueError):
    """Input a person can mend: the message is one line that names the thing and the cure.

    Example:
        >>> raise BadInput("photos: no class folders; give a folder that holds one folder per class")
        Traceback (most recent call last):
        ...
        torchcaps.errors.BadInput: photos: no class folders; give a folder that holds one folder per class
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


class DataWarning(UserWarning):
    """Something about the data that a person should know: the result may not be what they expect. One line.

    Example:
        >>> import warnings
        >>> warnings.warn("photos: skipped 2 files", DataWarning, stacklevel=2)  # doctest: +SKIP
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error line about an unknown name: the nearest known one, and all of them.

    Example:
        >>> nearest("capsnett", ["capsnet", "pooled-cnn"])
        "; did you mean 'capsnet'? Known: capsnet, pooled-cnn"
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return (f"; did you mean {close[0]!r}?" if close else ".") + f" Known: {', '.join(names)}"
