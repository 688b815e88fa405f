"""The class that a plugin's own tests derive from."""

from __future__ import annotations

from typing import Any, ClassVar

from trivet.conformance.check import Tier

PROPERTIES = ("model_type", "tiers", "seed")


class FamilyConformance:
    """Every conformance check of one family, as tests of a class.

    A subclass states properties and nothing else: checks are not methods, so that none can be removed or overridden.
    A check that is known to fail stands in `ModelFamily.expected_failures`, with a reason and a link.

    Attributes:
        model_type: whose family is tested; it has to be installed.
        tiers: which tiers; None: protocol and numerics, and device where there is CUDA.
        seed: of every drawn input.

    Raises:
        TypeError: a subclass defines something else.
    """

    model_type: ClassVar[str]
    tiers: ClassVar[tuple[Tier, ...] | None] = None
    seed: ClassVar[int] = 0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        strange = [name for name in vars(cls) if not name.startswith("__") and name not in PROPERTIES]
        if strange:
            raise TypeError(
                f"{cls.__name__} defines {strange}: a FamilyConformance states {', '.join(PROPERTIES)} and nothing "
                "else; checks cannot be removed or overridden, a known failure goes to ModelFamily.expected_failures "
                "with its reason and link"
            )
        if not isinstance(getattr(cls, "model_type", None), str):
            raise TypeError(f"{cls.__name__} has no model_type, expected the name of the plugin's entry point")

    def test_needs_the_pytest_plugin(self) -> None:
        """Found by pytest only where the plugin that makes tests of the checks is not active."""
        raise AssertionError(
            "the conformance checks were not collected: run pytest with -p trivet.conformance, for example by "
            'addopts = ["-p", "trivet.conformance"] in pyproject.toml'
        )
