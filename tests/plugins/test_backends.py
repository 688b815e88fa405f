"""An installed attention backend is asked for every model, and serves where nothing but the reference path would."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.runtimes import make_checkpoint

import trivet_qwen3
from trivet.attention import candidates
from trivet.attention.reference.path import REFERENCE, ReferencePath
from trivet.capacity import DeviceProfile
from trivet.errors import ConfigError
from trivet.plugin import AttentionBackend, DecodePath, PathRequest, PluginManager, Verdict, hookimpl, standard_paths
from trivet.runtime.blueprint import draw_blueprint
from trivet.runtime.options import SizingOptions

CPU, H200 = DeviceProfile.named("cpu"), DeviceProfile.named("h200")


class Mine(ReferencePath):
    """A path of a backend of its own."""

    name = backend = "mine"
    asked = 0

    def __init__(self, answer: Callable[[], object]) -> None:
        super().__init__()
        object.__setattr__(self, "answer", answer)

    def usable(self, need: PathRequest) -> Verdict:
        type(self).asked += 1
        return self.answer()  # type: ignore[attr-defined, no-any-return]


def yes() -> Verdict:
    return Verdict(True, "a kernel for this very device")


def no() -> Verdict:
    return Verdict(False, "no kernel for this device")


def broken() -> Verdict:
    raise OSError("no kernel library")


def manager(answer: Callable[[], object]) -> PluginManager:
    """Qwen3 as it ships, and an installed backend whose one path gives this answer."""

    class Backend:
        @hookimpl
        def trivet_attention_backends(self) -> list[AttentionBackend]:
            return [AttentionBackend(name="mine", decode_paths=(Mine(answer),))]

    return PluginManager.of(families={"qwen3": trivet_qwen3.plugin}, backends={"mine": Backend()})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint("qwen3", tmp_path, head_dim=64)


def chosen(checkpoint: Path, answer: Callable[[], object], device: DeviceProfile = CPU, **options: str) -> list[str]:
    """The names of the paths that are asked, the last of which serves."""
    blueprint = draw_blueprint(checkpoint, SizingOptions(**options), device, manager(answer))  # type: ignore[arg-type]
    (selection,) = blueprint.selections.values()
    assert selection.verdicts[-1][0] == selection.path.name
    return [name for name, _ in selection.verdicts]


def test_a_backend_that_says_yes_serves_before_the_reference(checkpoint: Path) -> None:
    assert chosen(checkpoint, yes)[-1] == "mine"


def test_a_backend_that_says_no_leaves_the_model_to_the_reference(checkpoint: Path) -> None:
    assert chosen(checkpoint, no)[-2:] == ["mine", REFERENCE]


def test_the_family_s_own_paths_are_asked_before_a_backend_s(checkpoint: Path) -> None:
    before = Mine.asked
    assert chosen(checkpoint, yes, H200, dtype="bfloat16")[-1].startswith("flashinfer")
    assert Mine.asked == before


def test_a_backend_that_is_named_serves_alone(checkpoint: Path) -> None:
    assert chosen(checkpoint, yes, H200, dtype="bfloat16", attention="mine")[-1] == "mine"
    with pytest.raises(ConfigError, match="no kernel for this device"):
        chosen(checkpoint, no, H200, dtype="bfloat16", attention="mine")


@pytest.mark.parametrize(("answer", "said"), [(broken, "OSError: no kernel library"), (lambda: None, "a Verdict")])
def test_a_backend_whose_predicate_fails_is_passed_over_and_named(
    answer: Callable[[], object], said: str, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="trivet.attention"):
        assert chosen(checkpoint, answer)[-2:] == ["mine", REFERENCE]
    (record,) = caplog.records
    assert "'mine'" in record.getMessage() and said in record.getMessage()


def test_a_reference_path_that_the_family_does_not_list_last_stays_where_it_is() -> None:
    mine, reference = Mine(yes), ReferencePath()
    first, *_ = standard_paths()
    own: list[DecodePath] = [reference, first]
    assert candidates(own, [mine]) == (reference, first, mine)
    assert candidates(own[::-1], [mine]) == (first, mine, reference)
    assert candidates([reference], [mine]) == (mine, reference)
    assert candidates([], [mine]) == (mine,)
