"""``trivet generate``: continue prompts, or answer them, with a checkpoint from disk."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from trivet.cli.debug import debug_option
from trivet.cli.limits import loading_arguments
from trivet.cli.numbers import Number
from trivet.cli.progress import answers_bar, loading_bar
from trivet.cli.sizing import COUNT, DEFAULT_MODEL, sizing_options

if TYPE_CHECKING:
    from trivet import Completion, Runtime, Sampling

DEFAULT_NEW_TOKENS = 64


@click.command()
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPT...")
@click.option(
    "--model", default=DEFAULT_MODEL, show_default=True, metavar="DIR|NAME", help="Checkpoint, or a shipped model."
)
@click.option("--device", metavar="NAME", help="cpu, cuda or cuda:1; CUDA if there is one by default.")
@click.option("--weights", type=click.Choice(["checkpoint", "random"]), help="Where the weights come from.")
@click.option("--max-new-tokens", type=COUNT, default=DEFAULT_NEW_TOKENS, show_default=True, help="Most new tokens.")
@click.option("--temperature", type=Number(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=click.IntRange(min=0), default=0, help="Draw from the k most probable tokens; 0: all.")
@click.option("--top-p", type=Number(0, 1, min_open=True), default=1.0, help="Draw from this probability.")
@click.option("--seed", type=int, help="Seed of the draws; equal seeds draw equal tokens.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End at this text; may be given several times.")
@click.option("--chat", is_flag=True, help="Each prompt is a user's message, put through the chat template.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per prompt on stdout, a line each.")
@click.option("--stats", is_flag=True, help="Also show tokens per second and the memory ledger.")
@sizing_options
@debug_option
def generate(
    prompts: tuple[str, ...],
    model: str,
    device: str | None,
    weights: str | None,
    chat: bool,
    as_json: bool,
    stats: bool,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    stop: tuple[str, ...],
    **sizing: Any,
) -> int:
    """Generate text: continue each prompt, or answer it with --chat."""
    _say_if_random(model, weights)
    from trivet import Runtime, Sampling

    sampling = Sampling(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop
    )
    arguments = loading_arguments(model, {"device": device, "weights": weights, **sizing})
    with loading_bar(model) as progress:
        runtime = Runtime.load(model, progress=progress, **arguments)
    with runtime:
        started = time.perf_counter()
        completions = _complete(runtime, prompts, sampling, chat)
        seconds = time.perf_counter() - started
        failed = 0
        for prompt, completion in zip(prompts, completions, strict=True):
            click.echo(_json_line(completion) if as_json else _text("" if chat else prompt, completion))
            if completion.finish_reason not in ("stop", "length"):
                failed += 1
                cause = f"{type(completion.error).__name__}: {completion.error}" if completion.error else ""
                click.echo(f"trivet: {prompt!r} ended as {completion.finish_reason}: {cause}", err=True)
        if stats:
            click.echo(_stats(runtime, completions, seconds), err=as_json)
    return 1 if failed else 0


def _complete(runtime: Runtime, prompts: Sequence[str], sampling: Sampling, chat: bool) -> Sequence[Completion]:
    given = [runtime.chat_ids([{"role": "user", "content": prompt}]) for prompt in prompts] if chat else prompts
    requests = [runtime.submit(prompt, sampling) for prompt in given]
    with answers_bar(len(requests)) as one_done:
        for request in requests:
            request.wait()
            one_done()
    return [request.completion for request in requests]


def _json_line(completion: Completion) -> str:
    fields = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "cached_tokens": completion.cached_tokens,
    }
    return json.dumps(fields, separators=(",", ":"))


def _text(prompt: str, completion: Completion) -> str:
    return f"{prompt}{completion.text}"


def _stats(runtime: Runtime, completions: Sequence[Completion], seconds: float) -> str:
    tokens = sum(len(completion.token_ids) for completion in completions)
    speed = f"{tokens} new tokens in {seconds:.2f} s: {tokens / max(seconds, 1e-9):.1f} tok/s"
    return f"\n{speed}\n\nmemory ledger\n{runtime.memory.table()}"


def _say_if_random(model: str, weights: str | None) -> None:
    """Say on stderr that the text will be noise, where nobody trained the weights."""
    from trivet.config.document import ConfigDocument
    from trivet.runtime.locate import locate_checkpoint

    document = ConfigDocument.read(locate_checkpoint(model))
    if weights == "random":
        click.echo(f"{model}: --weights random: the text is noise", err=True)
    elif document.raw("trivet_weights") == "random":
        click.echo(f"{model} has random weights (its config.json says so): the text is noise", err=True)
