"""The figures of README.md, written from RESULTS.json so that they cannot drift from it."""

from pathlib import Path
from typing import Any

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def summary(results: dict[str, Any]) -> str:
    """A Markdown table with a column for each model of `results`, and the commands that made them."""
    rows = [
        ("parameters", lambda record: f"{record['parameters']:,}"),
        ("model.safetensors, bytes", lambda record: f"{record['checkpoint_bytes']['model.safetensors']:,}"),
        ("training documents", lambda record: f"{record['data']['documents']:,}"),
        ("training tokens", lambda record: f"{record['data']['tokens']:,}"),
        ("tokens seen", lambda record: f"{record['training']['tokens_seen']:,}"),
        ("steps", lambda record: f"{record['training']['steps']:,}"),
        ("hardware", lambda record: record["hardware"]),
        ("training time, s", lambda record: str(record["training"]["seconds"])),
        ("held-out loss, nats per token", lambda record: _loss(record, "nats_per_token")),
        ("the grammar's own choices, nats per token", lambda record: _loss(record, "grammar_nats_per_token")),
        ("ten kept continuations that parse", lambda record: record["evaluation"]["kept_stories_parsed"]),
        ("all judged continuations that parse", lambda record: _share(record, "stories_parsed")),
        ("... that are absent from the training text", lambda record: _share(record, "stories_absent_from_training")),
        ("chat questions whose answer parses", lambda record: record["evaluation"]["chats_parsed"]),
    ]
    names = sorted(results)
    lines = [
        "| | " + " | ".join(names) + " |",
        "| --- |" + " ---: |" * len(names),
        *(f"| {title} | " + " | ".join(value(results[name]) for name in names) + " |" for title, value in rows),
        "",
        "```",
        *(results[name]["command"] for name in names),
        "```",
    ]
    return "\n".join(lines)


def _loss(record: dict[str, Any], key: str) -> str:
    return f"{record['evaluation']['held_out_loss'][key]:.4f}"


def _share(record: dict[str, Any], key: str) -> str:
    return f"{record['evaluation'][key]}/{record['evaluation']['stories_judged']}"


def with_figures(readme: str, results: dict[str, Any]) -> str:
    """`readme` with the text between its two marks replaced by the summary of `results`."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{summary(results)}\n{END}{after}"
