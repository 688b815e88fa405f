"""The one grammar of the tiny models: stories and conversations, for writing and for reading."""

from . import stories, turns
from .grammar import Grammar

STORY, CONVERSATION = "story", "conversation"


def tiny_language() -> Grammar:
    """The grammar with both start symbols, `STORY` and `CONVERSATION`."""
    return Grammar(
        productions={**stories.PRODUCTIONS, **turns.PRODUCTIONS},
        domains={**stories.DOMAINS, **turns.DOMAINS},
        distinct=(*stories.DISTINCT, *turns.DISTINCT),
    )
