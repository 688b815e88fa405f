"""The mutants apply to the sources as they are, and the runner tells the killed from the survivors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.mutants.patch import DoesNotApply, Patch
from tests.mutants.run import PATCHES, ROOT, main, targets_of

ALL = sorted(PATCHES.rglob("*.patch"))


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_each_mutant_applies_and_says_what_is_wrong(path: Path, tmp_path: Path) -> None:
    patch = Patch.read(path)
    for file in patch.files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    before = {file: (tmp_path / file).read_text() for file in patch.files}
    patch.apply(tmp_path)
    for file in patch.files:
        changed = (tmp_path / file).read_text()
        assert changed != before[file]
        compile(changed, file, "exec") if file.endswith(".py") else None
    assert patch.headers.keys() >= {"Fault"} and targets_of(patch)


def test_the_mutants_concern_families_template_and_sdk() -> None:
    files = {file for path in ALL for file in Patch.read(path).files}
    for prefix in ("plugins/qwen3/", "plugins/qwen35/", "core/trivet/cli/template/", "core/trivet/attention/"):
        assert any(file.startswith(prefix) for file in files), prefix
    assert len(ALL) >= 24


def test_hunks_are_found_by_their_text_wherever_they_have_moved(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("new\n" * 5 + "one\ntwo\nthree\n")
    (tmp_path / "m.patch").write_text("Fault: x\n--- a/a.py\n+++ b/a.py\n@@ -1,3 +1,3 @@\n one\n-two\n+TWO\n three\n")
    Patch.read(tmp_path / "m.patch").apply(tmp_path)
    assert (tmp_path / "a.py").read_text() == "new\n" * 5 + "one\nTWO\nthree\n"
    with pytest.raises(DoesNotApply, match=r"a\.py does not hold"):
        Patch.read(tmp_path / "m.patch").apply(tmp_path)


HARMLESS = """Fault: none, really
Targets: qwen3
--- a/plugins/qwen3/trivet_qwen3/model.py
+++ b/plugins/qwen3/trivet_qwen3/model.py
@@ -1,3 +1,4 @@
 \"\"\"Qwen3's layers (arXiv 2505.09388): pre-norm attention with normed heads, then a gated MLP.\"\"\"
 
+
 from __future__ import annotations
"""
DEADLY = HARMLESS.replace("+\n from __future__", "+raise RuntimeError\n from __future__").replace("none", "dies")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_survivors_are_named_and_make_the_run_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "harmless.patch").write_text(HARMLESS)
    (tmp_path / "deadly.patch").write_text(DEADLY)
    shutil.copy(PATCHES / "qwen3-imports-what-is-private.patch", tmp_path)
    assert main([str(tmp_path), "--workers", "1"]) == 1
    said = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in said if "unmodified" not in line}
    assert said[-1] == "killed 1/3"
    assert "SURVIVED: every check passed on qwen3" in rows["harmless"]
    assert "SURVIVED: no fair trial" in rows["deadly"]
    assert "SURVIVED" not in rows["qwen3-imports-what-is-private"]
    assert "plugin.public-imports/1" in rows["qwen3-imports-what-is-private"]
    assert sum("SURVIVED" in line for line in said) == 2


def test_a_folder_without_patches_is_wrong_usage(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 2
