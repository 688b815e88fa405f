"""The class that a plugin's own tests derive from."""

from __future__ import annotations

from typing import Any, ClassVar

from trivet.conformance.check import TIERS, Tier

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
        TypeError: a subclass defines something else, or a property is none that can be tested.
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
        if cls.tiers is not None:
            named = None if isinstance(cls.tiers, str) else tuple(cls.tiers)
            if not named or any(tier not in TIERS for tier in named):
                raise TypeError(
                    f"{cls.__name__}.tiers is {cls.tiers!r}, expected None or one or more of {', '.join(TIERS)}, as in "
                    f"({TIERS[0]!r},)"
                )
            cls.tiers = named
        if not isinstance(cls.seed, int) or isinstance(cls.seed, bool):
            raise TypeError(f"{cls.__name__}.seed is {cls.seed!r}, expected an integer")

    def test_needs_the_pytest_plugin(self) -> None:
        """Found by pytest only where the plugin that makes tests of the checks is not active."""
        raise AssertionError(
            "the conformance checks were not collected: run pytest with -p trivet.conformance, for example by "
            'addopts = ["-p", "trivet.conformance"] in pyproject.toml'
        )
