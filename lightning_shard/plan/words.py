"""Numbers as people read them."""

_STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def size_in_words(size: float) -> str:
    """Bytes in decimal units: ``"26.25 GB"``."""
    return f"{count_in_words(size)}B" if abs(size) >= 1e3 else f"{count_in_words(size)} B"


def count_in_words(count: float) -> str:
    """A number of elements: ``"12.25 G"``; without a unit below a thousand."""
    for scale, letter in _STEPS:
        if abs(count) >= scale:
            return f"{_short(count / scale)} {letter}"
    return _short(count)


def parameters_in_words(count: float) -> str:
    """A number of parameters: ``"7 billion parameters"``."""
    for scale, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= scale:
            return f"{_short(count / scale)} {word} parameters"
    return f"{count:,.0f} parameter{'' if count == 1 else 's'}"


def seconds_in_words(seconds: float) -> str:
    """A time: ``"1.25 s"``, ``"310 ms"``, ``"42 us"``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{_short(seconds / scale)} {unit}"
    return f"{_short(seconds * 1e6)} us"


def percent_in_words(fraction: float) -> str:
    """A share: ``"27.3 %"``."""
    return f"{100 * fraction:.1f} %"


def _short(number: float) -> str:
    """With up to two decimals."""
    text = f"{number:,.2f}"
    return text.rstrip("0").rstrip(".")
