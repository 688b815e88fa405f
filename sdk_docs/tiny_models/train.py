"""Make a tiny model from the seed with one command: data, tokenizer, training, evaluation.

    python -m sdk_docs.tiny_models.train --model tiny-qwen3 --device cuda --out DIR

writes DIR/tiny-qwen3/ (the checkpoint) and DIR/tiny-qwen3.json (what was done and what came of it).
"""

import argparse
import json
import math
import os
import platform
import random
import sys
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from . import corpus
from .checkpoint import spread_time_steps, write_checkpoint
from .evaluate import evaluate, file_sha256, readable_json
from .geometries import MODEL_NAMES, model_class, model_config
from .tokenizer import train_tokenizer

if TYPE_CHECKING:
    import torch

WARM_UP_STEPS = 200
DEFAULT_STEPS = 4000


@frozen
class Plan:
    """What a training run is, beside the model.

    Attributes:
        rows: packed sequences in a step.
        row_tokens: tokens of a sequence.
        learning_rate: the peak; see the function of that name.
        weight_decay: AdamW's, for matrices alone.
        gradient_norm: gradients are scaled down to this global norm.
    """

    seed: int = corpus.SEED
    documents: int = corpus.TRAINING_DOCUMENTS
    rows: int = 32
    row_tokens: int = 384
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.1
    gradient_norm: float = 1.0


def packed_rows(ids: "list[array[int]]", row_tokens: int, order: random.Random) -> "array[int]":
    """One epoch: shuffled documents, packed into rows of ``row_tokens + 1`` ids: inputs and shifted targets.

    Each row begins at a document's begin, as a prompt does. The document that does not fit is cut there; another epoch
    cuts others.
    """
    shuffled = list(range(len(ids)))
    order.shuffle(shuffled)
    rows, row = array("h"), array("h")
    for index in shuffled:
        row.extend(ids[index])
        if len(row) > row_tokens:
            rows.extend(row[: row_tokens + 1])
            row = array("h")
    return rows


class Batches:
    """The endless stream of steps' rows, epoch after epoch: int64 of shape (rows, row_tokens + 1) on the device."""

    def __init__(self, ids: "list[array[int]]", plan: Plan, device: str) -> None:
        self._ids, self._plan, self._device = ids, plan, device
        self._order = random.Random(f"{plan.seed}/order")
        self._rows: torch.Tensor | None = None
        self._next_row = 0
        self.epochs = 0

    def next(self) -> "torch.Tensor":
        import torch

        plan = self._plan
        if self._rows is None or self._next_row + plan.rows > len(self._rows):
            packed = packed_rows(self._ids, plan.row_tokens, self._order)
            epoch = torch.tensor(packed, dtype=torch.int16).view(-1, plan.row_tokens + 1)
            if len(epoch) < plan.rows:
                raise ValueError(f"{len(self._ids)} documents fill {len(epoch)} rows, a step needs {plan.rows}")
            self._rows, self._next_row = epoch.to(self._device), 0
            self.epochs += 1
        batch = self._rows[self._next_row : self._next_row + plan.rows]
        self._next_row += plan.rows
        return batch.long()


def learning_rate(plan: Plan, step: int, progress: float) -> float:
    """Linear warm-up over the first steps, under half a cosine over the whole run down to a hundredth of the peak.

    `progress` is the share of the run that is done, from 0 to 1.
    """
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    return plan.learning_rate * warm_up * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def initial_model(name: str, seed: int) -> Any:
    """The model as transformers initialises it, but for the recurrent heads' time steps (see `spread_time_steps`)."""
    import torch

    torch.manual_seed(seed)
    model = model_class(name)(model_config(name))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("dt_bias"):
                parameter.copy_(spread_time_steps(parameter.numel()))
    return model


def train(
    model: Any, ids: "list[array[int]]", plan: Plan, device: str, steps: int, minutes: float | None
) -> dict[str, Any]:
    """Train `model` in place for `steps` steps, or until `minutes` have passed; returns the record.

    Everything is float32; on CUDA the matrix products take TensorFloat-32. With `minutes` the learning rate follows the
    clock, so that a run of unknown speed ends at its lowest rate too; the record says how many steps that were.
    """
    import torch

    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    model.to(device).train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [one for one in parameters if one.dim() > 1], "weight_decay": plan.weight_decay},
            {"params": [one for one in parameters if one.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=plan.learning_rate,
        betas=(0.9, 0.95),
        fused=device.startswith("cuda"),
    )
    batches = Batches(ids, plan, device)
    curve: list[tuple[int, float]] = []
    running = torch.zeros((), device=device)
    since = 0
    began = time.perf_counter()
    step, progress = 0, 0.0
    while progress < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plan, step, progress)
        batch = batches.next()
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, plan.gradient_norm)
        optimizer.step()
        running += loss.detach()
        since += 1
        step += 1
        if step in (1, 10, 50) or step % 100 == 0:
            curve.append((step, round(running.item() / since, 4)))
            running.zero_()
            since = 0
            if step <= 100 or step % 500 == 0:
                print(f"step {step} loss {curve[-1][1]}", file=sys.stderr, flush=True)
        progress = step / steps if minutes is None else (time.perf_counter() - began) / (60 * minutes)
    _synchronise(device)
    seconds = time.perf_counter() - began
    return {
        "steps": step,
        "schedule": "steps" if minutes is None else f"clock, {minutes} minutes",
        "epochs_begun": batches.epochs,
        "tokens_seen": step * plan.rows * plan.row_tokens,
        "seconds": round(seconds, 1),
        "plan": asdict(plan),
        "loss_curve": curve,
    }


def _synchronise(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _hardware(device: str) -> str:
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def main() -> None:
    defaults = Plan()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODEL_NAMES, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="folder that gets the checkpoint and the record")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    length.add_argument("--minutes", type=float, help="train for this long instead")
    parser.add_argument("--seed", type=int, default=corpus.SEED)
    parser.add_argument("--documents", type=int, default=corpus.TRAINING_DOCUMENTS)
    parser.add_argument("--rows", type=int, default=defaults.rows)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="for making the data")
    parser.add_argument("--no-evaluation", action="store_true", help="leave that to sdk_docs.tiny_models.evaluate")
    arguments = parser.parse_args()

    import tokenizers
    import torch
    import transformers

    plan = Plan(
        seed=arguments.seed, documents=arguments.documents, rows=arguments.rows, learning_rate=arguments.learning_rate
    )
    began = time.perf_counter()
    made = corpus.documents(plan.seed, corpus.TRAINING, plan.documents, arguments.processes)
    text = corpus.joined(made)
    tokenizer = train_tokenizer(one.text for one in made[: corpus.TOKENIZER_DOCUMENTS])
    ids = corpus.encoded(tokenizer, made)
    record: dict[str, Any] = {
        "command": "python -m sdk_docs.tiny_models.train "
        + " ".join("DIR" if one == str(arguments.out) else one for one in sys.argv[1:]),
        "seed": plan.seed,
        "data": {
            "documents": len(made),
            "characters": len(text),
            "tokens": sum(map(len, ids)),
            "sha256": corpus.sha256(text),
            "seconds": round(time.perf_counter() - began, 1),
        },
        "tokenizer_sha256": corpus.sha256(tokenizer.to_str()),
        "hardware": _hardware(arguments.device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
    print(json.dumps(record["data"]), file=sys.stderr, flush=True)
    model = initial_model(arguments.model, plan.seed)
    record["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    record["training"] = train(model, ids, plan, arguments.device, arguments.steps, arguments.minutes)
    folder = arguments.out / arguments.model
    write_checkpoint(model.cpu(), tokenizer, folder)
    record["weights_sha256"] = file_sha256(folder / "model.safetensors")
    record["checkpoint_bytes"] = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    record_path = arguments.out / f"{arguments.model}.json"
    record_path.write_text(readable_json(record))  # what is known already, should evaluation fail
    if not arguments.no_evaluation:
        record["evaluation"] = evaluate(folder, plan.seed, text)
        record_path.write_text(readable_json(record))


if __name__ == "__main__":
    main()
