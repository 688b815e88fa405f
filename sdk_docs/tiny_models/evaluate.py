"""What a trained checkpoint can do: held-out loss, and greedy answers to prompts that it has never seen.

    python -m sdk_docs.tiny_models.evaluate --run DIR/tiny-qwen3.json --checkpoint core/trivet/models/tiny-qwen3

makes the data again from the seed that the training record names, judges the stored checkpoint (read from its bfloat16
file, run in float32 on CPU by transformers), and puts record and judgement into RESULTS.json under the folder's name
and their figures into README.md.
"""

import argparse
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import corpus
from .geometries import END_OF_TEXT, END_TOKEN_IDS, TURN_END, TURN_START
from .grammar import Grammar
from .language import CONVERSATION, STORY, tiny_language
from .summary import README, with_figures

RESULTS = Path(__file__).parent / "RESULTS.json"
_LONG = ("stories", "chats", "failures")
HELD_OUT_STORIES = 10
JUDGED_STORIES = 40
"""The first `HELD_OUT_STORIES` are kept in full; the share that parses is counted over all of them."""
LOSS_DOCUMENTS = 300
NEW_TOKENS = 320
CHAT_QUESTIONS = (
    "What colour is the sky?",
    "What is 3 plus 4?",
    'What is the opposite of "hot"?',
    "Lucy put a red ball under the bed and a blue kite behind the door. Where is the kite?",
    "Tell me a story about a fox.",
)


def held_out_prompts(seed: int, training_text: str, count: int) -> list[str]:
    """Openings of held-out stories, up to the first sentence of the plot, that the training text does not contain."""
    prompts: list[str] = []
    for number in range(corpus.HELD_OUT_DOCUMENTS):
        document = corpus.document(seed, corpus.HELD_OUT, number)
        if document.start != STORY:
            continue
        opening, middle = document.text.split("\n\n")[:2]
        prompt = f"{opening}\n\n{middle[: middle.index('. ') + 1]}" if ". " in middle else opening
        if prompt not in training_text and prompt not in prompts:
            prompts.append(prompt)
        if len(prompts) == count:
            return prompts
    raise ValueError(f"only {len(prompts)} of {count} held-out prompts are absent from the training text")


def held_out_loss(model: Any, tokenizer: Any, seed: int, count: int) -> dict[str, float]:
    """Mean natural-log loss per token over held-out documents, each on its own, beside what the grammar allows.

    The first token of a document has nothing before it and is not predicted; its share of the grammar's choices stays
    counted, so the bound is a little high.
    """
    import torch

    nats = loss_sum = 0.0
    predicted = 0
    for number in range(count):
        document = corpus.document(seed, corpus.HELD_OUT, number)
        ids = tokenizer(document.text + END_OF_TEXT, return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        loss_sum += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        predicted += ids.shape[1] - 1
        nats += document.nats
    return {
        "documents": count,
        "tokens": predicted,
        "nats_per_token": round(loss_sum / predicted, 5),
        "grammar_nats_per_token": round(nats / predicted, 5),
    }


def continuation(model: Any, tokenizer: Any, prompt: str) -> tuple[list[int], str]:
    """The greedy continuation: its token ids with the end token, and its text without."""
    import torch

    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        new = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :].tolist()
    kept = new[:-1] if new[-1] in END_TOKEN_IDS else new
    return new, tokenizer.decode(kept)


def longest_copy_words(text: str, training_text: str) -> int:
    """The most consecutive words of `text` that also stand so, with the same spacing, in the training text."""
    words = text.split(" ")
    longest = 0
    for at in range(len(words)):
        while at + longest < len(words) and " ".join(words[at : at + longest + 1]) in training_text:
            longest += 1
    return longest


def judge(grammar: Grammar, start: str, whole: str, ended: bool) -> dict[str, Any]:
    """Whether `whole` parses; a text that never ended only has to parse as far as it goes."""
    recognition = grammar.recognise(start, whole, prefix=not ended)
    verdict: dict[str, Any] = {"ended": ended, "parses": recognition.accepted}
    if not recognition.accepted:
        verdict["breaks_after"] = whole[max(0, recognition.reached_characters - 60) : recognition.reached_characters]
    return verdict


def evaluate(folder: Path, seed: int, training_text: str) -> dict[str, Any]:
    """Judge the checkpoint in `folder`; the counts come first, the texts after."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    grammar = tiny_language()
    stories = []
    for prompt in held_out_prompts(seed, training_text, JUDGED_STORIES):
        token_ids, text = continuation(model, tokenizer, prompt)
        entry = {
            "prompt": prompt,
            "continuation": text,
            "token_ids": token_ids,
            "new_tokens": len(token_ids),
            "absent_from_training": text not in training_text,
            **judge(grammar, STORY, prompt + text, token_ids[-1] in END_TOKEN_IDS),
        }
        stories.append(entry)
    kept = stories[:HELD_OUT_STORIES]
    for entry in kept:
        entry["longest_copy_words"] = longest_copy_words(entry["continuation"], training_text)
    chats = []
    for question in CHAT_QUESTIONS:
        prompt = f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n"
        token_ids, text = continuation(model, tokenizer, prompt)
        ended = token_ids[-1] in END_TOKEN_IDS
        whole = prompt + text + (f"{TURN_END}\n" if ended else "")
        chats.append({"question": question, "answer": text, **judge(grammar, CONVERSATION, whole, ended)})
    return {
        "held_out_loss": held_out_loss(model, tokenizer, seed, LOSS_DOCUMENTS),
        "stories_judged": len(stories),
        "stories_parsed": _count(stories, "parses"),
        "stories_ended": _count(stories, "ended"),
        "stories_absent_from_training": _count(stories, "absent_from_training"),
        "kept_stories_parsed": f"{_count(kept, 'parses')}/{len(kept)}",
        "chats_parsed": f"{_count(chats, 'parses')}/{len(chats)}",
        "failures": [
            {key: entry[key] for key in ("prompt", "continuation", "breaks_after")}
            for entry in stories
            if not entry["parses"]
        ],
        "stories": kept,
        "chats": chats,
    }


def _count(entries: Sequence[dict[str, Any]], key: str) -> int:
    return sum(bool(entry[key]) for entry in entries)


def readable_json(document: object) -> str:
    """JSON with an indent, but a list of numbers on one line."""
    text = json.dumps(document, indent=1, sort_keys=True)
    return re.sub(r"\[[\s\d.,]+\]", lambda match: " ".join(match[0].split()), text) + "\n"


def file_sha256(path: Path) -> str:
    """The digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="the record that training wrote")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="for making the data")
    arguments = parser.parse_args()
    record = json.loads(arguments.run.read_text())
    if file_sha256(arguments.checkpoint / "model.safetensors") != record["weights_sha256"]:
        raise SystemExit(f"{arguments.checkpoint}: these are not the weights that {arguments.run} tells about")
    made = corpus.documents(record["seed"], corpus.TRAINING, record["data"]["documents"], arguments.processes)
    text = corpus.joined(made)
    if corpus.sha256(text) != record["data"]["sha256"]:
        raise SystemExit(f"{arguments.run}: this grammar no longer makes the data that the weights were trained on")
    record["evaluation"] = evaluate(arguments.checkpoint, record["seed"], text)
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    results[arguments.checkpoint.name] = record
    arguments.results.write_text(readable_json(results))
    README.write_text(with_figures(README.read_text(), results))
    print(json.dumps({key: value for key, value in record["evaluation"].items() if key not in _LONG}, indent=1))


if __name__ == "__main__":
    main()
