"""Errors and warnings for users of the library and the command line; every message is one line."""

import difflib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate


class BadInput(ValueError):
    """Invalid input that the user can correct. The message is one line that names the problem and the cure.

    Arguments:
        message: the error message; line breaks are replaced with spaces.

    Example:
        >>> raise BadInput("photos has no class folders: give a folder with one subfolder of images per class")
        Traceback (most recent call last):
        ...
        torchcaps.errors.BadInput: photos has no class folders: give a folder with one subfolder of images per class
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


class Diverged(BadInput):
    """Training diverged: the loss, the weights or the outputs are not finite.

    Arguments:
        reason: what is not finite; line breaks are replaced with spaces.
        cure: what the user can do about it. The message is ``reason: cure``.

    Example:
        >>> raise Diverged("the loss is not finite", cure="lower the learning rate")
        Traceback (most recent call last):
        ...
        torchcaps.errors.Diverged: the loss is not finite: lower the learning rate
    """

    def __init__(self, reason: str, cure: str = "") -> None:
        super().__init__(f"{reason}: {cure}" if cure else reason)
        self.reason = reason


class DataWarning(UserWarning):
    """A problem with the data that may make the result differ from what the user expects.

    Arguments:
        message: the warning; line breaks are replaced with spaces.

    Example:
        >>> import warnings
        >>> warnings.warn("photos: skipped 2 files", DataWarning, stacklevel=2)  # doctest: +SKIP
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: the closest known name and all known names.

    Example:
        >>> nearest("capsnett", ["capsnet", "pooled-cnn"])
        "; did you mean 'capsnet'? Known: capsnet, pooled-cnn"
    """
    names = list(known)
    if not names:
        return "; none are known"
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    return (f"; did you mean {close[0]!r}?" if close else ".") + f" Known: {', '.join(names)}"


def unreadable(path: object, error: Exception, cure: str) -> BadInput:
    """Return the error for a file that cannot be read or has invalid content.

    Arguments:
        path: path of the file.
        error: error that occurred when the file was read.
        cure: what the user can do if the content is invalid.

    Example:
        >>> unreadable("config.json", KeyError("model"), "save the network again")
        BadInput("config.json is damaged (no entry 'model'): save the network again")
        >>> unreadable("config.json", PermissionError(13, "Permission denied"), "save the network again")
        BadInput('config.json cannot be read (Permission denied): check that it exists and that you may read it')
    """
    if isinstance(error, OSError):
        return BadInput(
            f"{path} cannot be read ({error.strerror or error}): check that it exists and that you may read it"
        )
    damage = f"no entry {error}" if isinstance(error, KeyError) else error
    return BadInput(f"{path} is damaged ({damage}): {cure}")


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error, or the name of its class if it has no message.

    If the first line ends with a colon, the second line is included, with at most 160 characters.

    Example:
        >>> first_line(ValueError("no weights\\nin line 3")), first_line(KeyError())
        ('no weights', 'KeyError')
        >>> first_line(RuntimeError("errors in weights:\\n  no bias\\n  no mean"))
        'errors in weights: no bias'
    """
    first, *more = (str(error).strip() or type(error).__name__).splitlines()
    return f"{first} {caption(more[0].strip(), most=160)}" if first.endswith(":") and more else first


def caption(text: str, most: int = 24) -> str:
    """Return `printable` text for a picture, at most as wide as `most` Latin letters; "…" replaces the middle.

    A letter of an East Asian script and an emoji are as wide as two Latin letters.

    Example:
        >>> caption("a long name of a class", most=8)
        'a lo…ass'
    """
    text = printable(text)
    widths = [_width(letter) for letter in text]
    if sum(widths) <= most:
        return text
    first = sum(width <= most // 2 for width in accumulate(widths))
    last = sum(width <= most - 1 - most // 2 for width in accumulate(reversed(widths)))
    return f"{text[:first]}…{text[len(text) - last :]}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Join names with commas; of many names, only the first `most`.

    Example:
        >>> listed(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def captions(texts: Sequence[str], most: int = 24) -> list[str]:
    """Return the `caption` of each text. Equal captions end with the place of the text in the list, from 0.

    If a caption with such an ending is equal to another caption, all captions end with their places.

    Example:
        >>> captions(["view of the left knee, lateral", "view of the left hip, lateral"], most=12)
        ['view of… (0)', 'view of… (1)']
    """
    found = [caption(text, most) for text in texts]
    count = Counter(found)
    marked = [_numbered(texts[i], i, most) if count[name] > 1 else name for i, name in enumerate(found)]
    unique = len(set(marked)) == len(marked)  # a name may look like a numbered name
    return marked if unique else [_numbered(text, i, most) for i, text in enumerate(texts)]


def _numbered(text: str, number: int, most: int) -> str:
    """Return the start of `printable` text and a number in brackets, at most as wide as `most` Latin letters."""
    mark = f" ({number})"
    start, room = printable(text), most - len(mark)
    if sum(map(_width, start)) > room:
        last = sum(width <= room - 1 for width in accumulate(map(_width, start)))
        start = f"{start[:last]}…"
    return start + mark


def _width(letter: str) -> int:
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def printable(text: str) -> str:
    """Escape control characters and invalid Unicode, so a terminal or a picture shows the text on one line.

    Example:
        >>> printable("a\\nb")
        'a\\\\nb'
    """
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
