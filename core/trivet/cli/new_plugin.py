"""``trivet new-plugin``: a complete distribution with a small working model family."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from string import Template

import click

from trivet import __version__
from trivet.cli.debug import debug_option
from trivet.errors import ConfigError

TEXT_SUFFIX = ".txt"
"""Of template files whose placeholders are filled in; others are copied as they are."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
LONGEST_PACKAGE = 100
_RENAMED = {"gitignore": ".gitignore", "github": ".github"}
"""Names that would mean something to tools already inside the template."""


@click.command("new-plugin")
@click.argument("name", metavar="NAME")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@debug_option
def new_plugin(name: str, directory: Path) -> int:
    """Write a plugin whose family serves the model_type NAME. DIR becomes the project's root."""
    write_plugin(name, directory)
    click.echo(f"wrote {directory}: a family for model_type {name!r} that works as it stands")
    click.echo(f"next: pip install -e {directory} && trivet doctor && trivet conform {name}")
    return 0


def write_plugin(name: str, directory: Path) -> None:
    """Fill in the template.

    Raises:
        ConfigError: `name` cannot name an entry point or is that of an installed package, or `directory` is not empty
            or cannot be made.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"plugin name {name!r}: expected the model_type of config.json, made of letters, digits, dots, dashes and "
            "underscores"
        )
    package = "trivet_" + re.sub(r"\W+", "_", name).lower()
    if len(package) > LONGEST_PACKAGE:
        raise ConfigError(f"plugin name {name!r} has {len(name)} characters: expected a name that a file can have")
    if find_spec(package) is not None:
        raise ConfigError(
            f"plugin name {name!r}: a package {package!r} is installed already, and the new one would take its place; "
            "choose another name, which should be the model_type of config.json"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is there already: expected a new or an empty directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made: {error.strerror}; choose another folder") from error
    values = {
        "name": name,
        "package": package,
        "distribution": package.replace("_", "-"),
        "trivet_version": __version__,
    }
    template = Path(str(resources.files("trivet.cli"))) / "template"
    for source in _files(template):
        parts = [_RENAMED.get(part, part) for part in source.relative_to(template).parts]
        if parts[0] == "package":
            parts[0] = package
        if parts[-1].endswith(TEXT_SUFFIX):
            last = parts[-1].removesuffix(TEXT_SUFFIX)
            target = directory.joinpath(*parts[:-1], _RENAMED.get(last, last))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(Template(source.read_text(encoding="utf-8")).substitute(values), encoding="utf-8")
        else:
            target = directory.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    models = Path(str(resources.files("trivet"))) / "models"
    shutil.copyfile(models / "tiny-qwen3" / "tokenizer.json", directory / "tiny" / "tokenizer.json")


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
