"""The calibration file: what this machine and its store cost, measured or given by hand.

`singleflight calibrate` writes it, `singleflight gate` reads it. Figures that are not in it are defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from singleflight.files import strict
from singleflight.twin.figures import Figures

SCHEMA = "kv-singleflight/calibration/2"

AGAIN = "run `singleflight calibrate` again"


class CalibrationError(ValueError):
    """A calibration file that cannot be used: one sentence, with the key, the value and what is accepted."""


@dataclass(frozen=True)
class Calibration:
    """The twin's figures, and where they were measured.

    Attributes:
        made_at: UTC, ISO 8601; empty in a file written by hand.
        machine: what it was measured on, free text by name.
        notes: sentences on how.
        figures: see `Figures`.
    """

    figures: Figures
    made_at: str = ""
    machine: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write the file, complete or not at all.

        Raises:
            OSError: it cannot be written.
        """
        strict.write(path, SCHEMA, self)


def read(path: Path) -> Calibration:
    """Read a calibration file.

    Raises:
        CalibrationError: missing, unreadable, another schema, an unknown key, a wrong type, unit or value.
    """
    try:
        return strict.read(path, SCHEMA, Calibration, again=AGAIN)
    except strict.Refused as fault:
        raise CalibrationError(str(fault)) from None
