"""A grammar that both writes and reads: one table of productions, one sampler, one recogniser.

A production is a template string. In it
    ``{hero}``       is a slot: the variable ``hero`` in its plain form,
    ``{hero.his}``   is the same variable in another form, so that pronouns and articles agree,
    ``<plot>``       is a symbol, expanded with the bindings of the sentence around it,
    ``<*turn>``      is a symbol, expanded with bindings of its own, forgotten afterwards.
A variable takes one `Word` of its domain at its first slot and keeps it: that is what makes a story speak of
one hero throughout, and what the recogniser holds a continuation to.
"""

import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence

from attrs import field, frozen

_PIECE = re.compile(r"\{(\w+)(?:\.(\w+))?\}|<(\*?)(\w+)>")
PLAIN = "plain"
Bindings = tuple[tuple[str, int], ...]
NO_BINDINGS: Bindings = ()


def _copied(forms: Mapping[str, str]) -> Mapping[str, str]:
    return dict(forms)


@frozen
class Word:
    """One entry of a domain: the forms in which it may stand in a sentence, ``plain`` among them."""

    forms: Mapping[str, str] = field(converter=_copied)

    @property
    def plain(self) -> str:
        return self.forms[PLAIN]


@frozen
class Literal:
    """Text that stands as it is."""

    text: str


@frozen
class Slot:
    """The place of a variable's word, in one of its forms."""

    variable: str
    form: str


@frozen
class Symbol:
    """The place of another production; `fresh` ones start without bindings and leave none behind."""

    name: str
    fresh: bool


@frozen
class _Restore:
    """Where a fresh symbol ends: the bindings from before it hold again."""

    bindings: Bindings


Piece = Literal | Slot | Symbol | _Restore


def pieces(template: str) -> tuple[Piece, ...]:
    """Split a template string into its literals, slots and symbols."""
    found: list[Piece] = []
    position = 0
    for match in _PIECE.finditer(template):
        if match.start() > position:
            found.append(Literal(template[position : match.start()]))
        variable, form, star, symbol = match.groups()
        found.append(Slot(variable, form or PLAIN) if variable else Symbol(symbol, bool(star)))
        position = match.end()
    if position < len(template):
        found.append(Literal(template[position:]))
    return tuple(found)


@frozen
class Sample:
    """A text that the grammar wrote.

    Attributes:
        text: the text.
        nats: the natural logarithm of one over the probability of the choices that led to it; the mean over many
            samples bounds the grammar's entropy from above (closely, as few texts have two derivations).
    """

    text: str
    nats: float


@frozen
class Recognition:
    """What the recogniser found.

    Attributes:
        accepted: the whole text follows the grammar.
        reached_characters: how far the text can be read at most; where a refused text breaks.
    """

    accepted: bool
    reached_characters: int


@frozen(eq=False)
class _Frame:
    """What is still to be read: the pieces of one alternative from `index` on, then `parent`."""

    alternative: tuple[Piece, ...]
    index: int
    parent: "_Frame | None"


class Grammar:
    """Productions, the domains of their variables, and which variables must differ from each other.

    Raises `ValueError` at construction for a symbol without production, a variable without domain or a form
    that some word of the domain lacks, so that neither reading nor writing can meet one later.
    """

    def __init__(
        self,
        productions: Mapping[str, Sequence[str]],
        domains: Mapping[str, Sequence[Word]],
        distinct: Iterable[frozenset[str]] = (),
    ) -> None:
        self._productions = {
            name: tuple(pieces(template) for template in templates) for name, templates in productions.items()
        }
        self._domains = {variable: tuple(words) for variable, words in domains.items()}
        self._rivals: dict[str, frozenset[str]] = {}
        for group in distinct:
            for variable in group:
                self._rivals[variable] = self._rivals.get(variable, frozenset()) | (group - {variable})
        self._check()

    def _check(self) -> None:
        for name, alternatives in self._productions.items():
            if not alternatives:
                raise ValueError(f"production {name!r} has no alternative")
            for piece in (piece for alternative in alternatives for piece in alternative):
                if isinstance(piece, Symbol) and piece.name not in self._productions:
                    raise ValueError(f"production {name!r} names <{piece.name}>, which has no production")
                if isinstance(piece, Slot):
                    if piece.variable not in self._domains:
                        raise ValueError(f"production {name!r} names {{{piece.variable}}}, which has no domain")
                    for word in self._domains[piece.variable]:
                        if piece.form not in word.forms:
                            raise ValueError(
                                f"production {name!r} asks {piece.variable!r} for its form {piece.form!r}; "
                                f"the word {word.plain!r} has only {sorted(word.forms)}"
                            )

    def words(self, variable: str) -> tuple[Word, ...]:
        """The domain of a variable."""
        return self._domains[variable]

    def _allowed(self, variable: str, bindings: Bindings) -> list[int]:
        """Indices of the words that an unbound variable may take beside `bindings`."""
        taken = {
            self._domains[rival][index].plain
            for rival, index in bindings
            if rival in self._rivals.get(variable, frozenset())
        }
        return [index for index, word in enumerate(self._domains[variable]) if word.plain not in taken]

    def sample(self, start: str, generator: random.Random) -> Sample:
        """Write one text from the symbol `start`: every choice is uniform over what is allowed.

        Only ``generator.random()`` is drawn from, whose sequence for a seed is the same in every Python.
        """
        written: list[str] = []
        nats = 0.0
        bindings: dict[str, int] = {}
        stack: list[Piece | dict[str, int]] = [Symbol(start, False)]
        while stack:
            piece = stack.pop()
            if isinstance(piece, Literal):
                written.append(piece.text)
            elif isinstance(piece, Slot):
                if piece.variable not in bindings:
                    allowed = self._allowed(piece.variable, tuple(bindings.items()))
                    bindings[piece.variable] = allowed[int(generator.random() * len(allowed))]
                    nats += math.log(len(allowed))
                written.append(self._domains[piece.variable][bindings[piece.variable]].forms[piece.form])
            elif isinstance(piece, Symbol):
                alternatives = self._productions[piece.name]
                chosen = alternatives[int(generator.random() * len(alternatives))]
                nats += math.log(len(alternatives))
                if piece.fresh:
                    stack.append(bindings)
                    bindings = {}
                stack.extend(reversed(chosen))
            elif isinstance(piece, dict):
                bindings = piece
        return Sample("".join(written), nats)

    def recognise(self, start: str, text: str, prefix: bool = False) -> Recognition:
        """Read `text` from the symbol `start`, with every agreement that the writing side keeps.

        With `prefix` a text that breaks off inside a production is accepted too: what a model wrote until its token
        limit. The search is depth first with a memory of what was tried, so it ends for any text as long as no
        production begins with itself.
        """
        tried: set[tuple[int, int, Bindings]] = set()
        frames: dict[tuple[int, int, int], _Frame] = {}
        reached = 0

        def frame(alternative: tuple[Piece, ...], index: int, parent: _Frame | None) -> _Frame | None:
            """The one frame for these three; an exhausted alternative is its parent."""
            if index == len(alternative):
                return parent
            key = (id(alternative), index, id(parent))
            if key not in frames:
                frames[key] = _Frame(alternative, index, parent)
            return frames[key]

        restores: dict[Bindings, tuple[Piece, ...]] = {}
        agenda: list[tuple[_Frame | None, int, Bindings]] = [
            (frame(alternative, 0, None), 0, NO_BINDINGS) for alternative in reversed(self._productions[start])
        ]
        while agenda:
            current, position, bindings = agenda.pop()
            reached = max(reached, position)
            if current is None:
                if position == len(text):
                    return Recognition(True, position)
                continue
            if prefix and position == len(text):
                return Recognition(True, position)
            key = (id(current), position, bindings)
            if key in tried:
                continue
            tried.add(key)
            piece = current.alternative[current.index]
            rest = frame(current.alternative, current.index + 1, current.parent)
            if isinstance(piece, Symbol):
                after: _Frame | None = rest
                inner = bindings
                if piece.fresh:
                    restore = restores.setdefault(bindings, (_Restore(bindings),))
                    after, inner = frame(restore, 0, rest), NO_BINDINGS
                for alternative in reversed(self._productions[piece.name]):
                    agenda.append((frame(alternative, 0, after), position, inner))
            elif isinstance(piece, _Restore):
                agenda.append((rest, position, piece.bindings))
            else:
                for form, bound in self._readings(piece, bindings):
                    if text.startswith(form, position):
                        agenda.append((rest, position + len(form), bound))
                    else:
                        shared = _shared_length(form, text, position)
                        reached = max(reached, position + shared)
                        if prefix and position + shared == len(text):
                            return Recognition(True, len(text))
        return Recognition(False, reached)

    def _readings(self, piece: Literal | Slot, bindings: Bindings) -> list[tuple[str, Bindings]]:
        """Each text that may stand at `piece`, with the bindings that hold once it was read."""
        if isinstance(piece, Literal):
            return [(piece.text, bindings)]
        words = self._domains[piece.variable]
        for variable, index in bindings:
            if variable == piece.variable:
                return [(words[index].forms[piece.form], bindings)]
        return [
            (words[index].forms[piece.form], (*bindings, (piece.variable, index)))
            for index in self._allowed(piece.variable, bindings)
        ]


def _shared_length(form: str, text: str, position: int) -> int:
    """How many characters of `form` stand at `position` of `text`."""
    count = 0
    for wanted, found in zip(form, text[position : position + len(form)], strict=False):
        if wanted != found:
            break
        count += 1
    return count
