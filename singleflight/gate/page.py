"""A verdict as one HTML page that needs nothing beside it: for who decides, and did not run the command."""

from __future__ import annotations

import base64
import io
from importlib import resources
from pathlib import Path

import jinja2

from singleflight.files.atomic import replaced
from singleflight.gate.decide import CROWDED, LEAST_MEAN, Gate
from singleflight.gate.report import LABELS, comparison, draw, named, percent, seconds
from singleflight.gate.verdict import Verdict
from singleflight.twin.quantity import Origin, Quantity


def write(path: Path, gate: Gate, of: Verdict) -> None:
    """Write the page.

    Raises:
        OSError: `path` cannot be written.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"duration": seconds, "percent": percent, "origin": _origin}
    template = environment.from_string(
        resources.files("singleflight.gate").joinpath("page.html.jinja").read_text(encoding="utf-8")
    )
    picture = io.BytesIO()
    draw(picture, gate, of)
    text = template.render(
        verdict=of,
        named=named(of),
        labels=[LABELS[mode] for mode in of.ttft],
        rows=comparison(of),
        differences=gate.differences,
        least_mean=LEAST_MEAN,
        ties_spread=gate.spreads[-1],
        crowded=CROWDED,
        picture=_data_uri(picture),
    )
    with replaced(path) as raw:
        raw.write(text.encode())


def _origin(quantity: Quantity) -> str:
    return "assumed" if quantity.origin is Origin.DEFAULT else quantity.origin.value


def _data_uri(png: io.BytesIO) -> str:
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
