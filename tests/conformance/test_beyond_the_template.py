"""The plugins that sdk_docs/beyond_the_template.md and sdk_docs/decode_paths.md end with conform."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.pages import PAGES, reader_of, run_page, write_files

from trivet.conformance import Asked, Kit

CAPPED = PAGES / "beyond_the_template.md"
GATHER = PAGES / "decode_paths.md"


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The project that the page ends with."""
    with reader_of(CAPPED, tmp_path_factory.mktemp("capped")) as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_page(CAPPED, folder)
        yield folder


def broken_by(file: Path, right: str, wrong: str) -> list[str]:
    """Which checks of the numerics tier fail where `right` in `file` is `wrong`."""
    source = file.read_text()
    assert right in source
    file.write_text(source.replace(right, wrong))
    modules = [name for name in sys.modules if name.partition(".")[0] == "trivet_capped"]
    for name in modules:
        del sys.modules[name]
    try:
        with Kit(Asked("capped", tiers=("numerics",))) as kit:
            return [o.id for check in kit.manifest() if (o := kit.run(check)).status == "failed"]
    finally:
        file.write_text(source)
        for name in modules:
            sys.modules.pop(name, None)


def test_the_family_conforms_with_nothing_not_run(capped: Path) -> None:
    with Kit(Asked("capped")) as kit:
        outcomes = [kit.run(check) for check in kit.manifest()]
    assert [(o.id, o.failure or o.reason) for o in outcomes if o.status != "passed"] == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('approximate="tanh"', 'approximate="none"'),
        ('parameters.below("mlp_post"), eps, zero_centred=True', 'parameters.below("mlp_post"), eps'),
        ("self.softcap is None", "True"),
    ],
)
def test_its_stored_numbers_tell_each_difference_from_the_template(right: str, wrong: str, capped: Path) -> None:
    assert "numerics.prefill/1" in broken_by(capped / "trivet_capped" / "model.py", right, wrong)


def test_the_decode_path_conforms_once_the_family_lists_it(tmp_path: Path) -> None:
    with reader_of(GATHER, tmp_path) as folder:
        write_files(GATHER, folder)
        file = folder / "trivet_gather" / "__init__.py"
        listed = "FAMILY = ModelFamily(\n    decode_paths=(GatherPath(), *standard_paths()),"
        source = file.read_text().replace("FAMILY = ModelFamily(", listed)
        imports = "from trivet.plugin import standard_paths\nfrom trivet_gather.path import GatherPath\n"
        file.write_text(source.replace("from trivet.plugin import (", imports + "from trivet.plugin import ("))
        with Kit(Asked("gather")) as kit:
            assert kit.family.decode_paths[0].name == "gather"
            outcomes = [kit.run(check) for check in kit.manifest()]
    assert [(o.id, o.failure or o.reason) for o in outcomes if o.status != "passed"] == []
