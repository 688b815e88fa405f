"""The byte-level BPE tokenizer of both models, and their chat template.

Every byte has a token, so any text encodes. Digits stand alone, which keeps sums learnable.
"""

from collections.abc import Iterable
from typing import Any

from .geometries import END_OF_TEXT, SPECIAL_TOKENS, TURN_END, TURN_START, VOCABULARY_TOKENS

CHAT_TEMPLATE = f"""\
{{%- for message in messages %}}
    {{%- if message.role not in ('system', 'user', 'assistant') %}}
        {{{{- raise_exception('unknown role ' ~ message.role ~ ': expected system, user or assistant') }}}}
    {{%- endif %}}
    {{{{- '{TURN_START}' ~ message.role ~ '\\n' ~ message.content ~ '{TURN_END}\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}
    {{{{- '{TURN_START}assistant\\n' }}}}
{{%- endif %}}
"""


def train_tokenizer(texts: Iterable[str]) -> Any:
    """A `tokenizers.Tokenizer` with `VOCABULARY_TOKENS` tokens; the same texts give the same tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def transformers_tokenizer(tokenizer: Any, max_tokens: int) -> Any:
    """The same tokenizer as transformers saves it: with its special tokens, length and chat template."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START, TURN_END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
    )
