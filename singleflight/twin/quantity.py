"""A figure, its unit, and where it came from: no number of the gate is without the three."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Self

from singleflight.files.shown import as_json
from singleflight.files.strict import Number, Refused

if TYPE_CHECKING:
    from rich.table import Table


class Origin(Enum):
    """Where a figure came from."""

    MEASURED = "measured"
    """By `singleflight calibrate`, or from the trace."""
    GIVEN = "given"
    """By a person, on the command line or in a file."""
    DEFAULT = "default"
    """By nobody: an assumption, see docs/gate.md."""


@dataclass(frozen=True)
class Quantity:
    """`value` in `unit`, e.g. 0.005 ``s``, 5e9 ``bytes/s``."""

    value: Number
    unit: str
    origin: Origin


def figure(value: float, unit: str, low: float = 0.0, high: float = 1e18) -> Any:
    """A field of a `FigureSet`: its default, its unit, and the least and the greatest value accepted."""
    return field(
        default=Quantity(value, unit, Origin.DEFAULT), metadata={"unit": unit, "low": low, "high": high}
    )


@dataclass(frozen=True)
class FigureSet:
    """What a model is fed with, a `figure` each; one that nobody sets is a default, and says so.

    Raises:
        Refused: another unit than the field's, or a value out of range.
    """

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            quantity, limits = getattr(self, each.name), each.metadata
            if quantity.unit != limits["unit"]:
                raise Refused(
                    f'{each.name}.unit: {as_json(quantity.unit)} is not accepted; give "{limits["unit"]}"'
                )
            if not limits["low"] <= quantity.value <= limits["high"]:
                raise Refused(
                    f"{each.name}.value: {quantity.value:g} is not accepted;"
                    f" give a number from {limits['low']:g} to {limits['high']:g}"
                )

    def given(self, **values: float) -> Self:
        """With these values, given by a person. Raises as the class does."""
        return self._with(Origin.GIVEN, values)

    def measured(self, **values: float) -> Self:
        """With these values, measured. Raises as the class does."""
        return self._with(Origin.MEASURED, values)

    def _with(self, origin: Origin, values: dict[str, float]) -> Self:
        units = {each.name: each.metadata["unit"] for each in dataclasses.fields(self)}
        return dataclasses.replace(
            self, **{name: Quantity(value, units[name], origin) for name, value in values.items()}
        )

    def as_dict(self) -> dict[str, Quantity]:
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

    def defaults(self) -> list[str]:
        """The names of those that nobody set."""
        return [name for name, quantity in self.as_dict().items() if quantity.origin is Origin.DEFAULT]


def quantities(figures: Mapping[str, Quantity]) -> Table:
    """Name, value, unit and origin, for a terminal."""
    from rich.table import Table

    table = Table("figure", "value", "unit", "from", title="Figures", title_justify="left")
    for name, quantity in figures.items():
        table.add_row(name, f"{quantity.value:,.4g}", quantity.unit, quantity.origin.value)
    return table
