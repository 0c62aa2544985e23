"""Many mistakes in one error."""

_MOST_LINES = 20


class Mistakes:
    """Collects lines that say what is wrong with a map."""

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}
        self._num_more = 0

    @property
    def has_room(self) -> bool:
        """Whether a further line will be shown: what is costly to say need not be found out otherwise."""
        return len(self._lines) < _MOST_LINES

    def add(self, line: str) -> None:
        """One mistake; a line that is there already is no further one."""
        if line in self._lines:
            return
        if self.has_room:
            self._lines[line] = None
        else:
            self._num_more += 1

    def raise_if_any(self) -> None:
        """ValueError with all lines, up to 20 and the number of the rest."""
        if not self._lines:
            return
        num_mistakes = len(self._lines) + self._num_more
        more = [f"... and {self._num_more} more"] if self._num_more else []
        head = "1 mistake" if num_mistakes == 1 else f"{num_mistakes} mistakes"
        raise ValueError("\n  ".join([f"the map of weights has {head}:", *self._lines, *more]))
