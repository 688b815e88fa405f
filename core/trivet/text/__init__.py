"""Text: the tokenizer, the chat template, and text that streams out token by token."""

from trivet.text.chat import ChatTemplate
from trivet.text.detokenizer import StreamDecoder
from trivet.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "StreamDecoder", "Tokenizer"]
