"""Line charts: an inline SVG whose colours follow the page's light or dark theme, or a PNG for places without CSS."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Drawn in the light theme's colours; in the SVG each is replaced by the page's variable of that role.
INK, MUTED, GRID = "#1f2430", "#6b7280", "#e3e5ea"
COLOURS = ("#2563c9", "#d9650b", "#118866", "#a2388b")
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--line"} | {c: f"--series-{i + 1}" for i, c in enumerate(COLOURS)}
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9.0,
    "svg.fonttype": "none",
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "text.color": INK,
}
SMOOTHED_FROM = 60


@dataclass(frozen=True)
class Series:
    """One line; `marked` draws its few points as dots."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    marked: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over one axis, with dotted reference levels (name, value)."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    references: Sequence[tuple[str, float]] = ()

    def svg(self) -> str:
        """An `<svg>` element without ids, sizes or colours of its own that could clash with the page's."""
        buffer = io.StringIO()
        # The salt makes the ids of one chart differ from another's, and equal from run to run.
        with mpl.rc_context(STYLE | {"svg.hashsalt": self.title}):
            self._draw().savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        text = buffer.getvalue()
        text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
        text = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', text, count=1)
        text = re.sub(r'<g id="[^"]*"', "<g", text)
        text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
        for colour, variable in VARIABLES.items():
            text = text.replace(colour, f"var({variable})")
        return text.replace("xlink:href", "href")

    def png(self) -> bytes:
        """The chart on white, 2 pixels per point."""
        buffer = io.BytesIO()
        with mpl.rc_context(STYLE):
            self._draw().savefig(buffer, format="png", dpi=144, facecolor="white")
        return buffer.getvalue()

    def png_uri(self) -> str:
        """The PNG as a `data:` address."""
        return "data:image/png;base64," + base64.b64encode(self.png()).decode()

    def _draw(self) -> Figure:
        figure = Figure(figsize=(5.6, 2.7), layout="constrained")
        axes = figure.add_subplot()
        drawn = [(series, colour) for series, colour in zip(self.series, COLOURS, strict=False) if len(series.x)]
        for series, colour in drawn:
            _line(axes, series, colour)
        for name, value in self.references:
            axes.axhline(value, color=MUTED, linewidth=0.9, linestyle=(0, (1.5, 2.5)))
            axes.annotate(
                name,
                (1, value),
                xycoords=("axes fraction", "data"),
                xytext=(-2, 2),
                textcoords="offset points",
                ha="right",
                color=MUTED,
                fontsize=8,
            )
        axes.set_xlabel(self.x_label)
        # Upright above the axis: set sideways it runs into the tick labels when the page's font is wider than ours.
        axes.set_title(self.y_label, loc="left", color=MUTED, fontsize=8.5)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        axes.margins(x=0.02, y=0.1)
        if len(drawn) > 1:
            axes.legend(frameon=False, loc="best", fontsize=8.5, labelcolor=INK, handlelength=1.4)
        return figure


def _line(axes: Axes, series: Series, colour: str) -> None:
    x, y = np.asarray(series.x, float), np.asarray(series.y, float)
    if series.marked or len(x) == 1:
        axes.plot(x, y, color=colour, linewidth=1.6, marker="o", markersize=3.6, label=series.name)
    elif len(x) < SMOOTHED_FROM:
        axes.plot(x, y, color=colour, linewidth=1.6, label=series.name)
    else:
        axes.plot(x, y, color=colour, linewidth=0.8, alpha=0.3)
        axes.plot(x, _smoothed(y, max(3, len(y) // 25)), color=colour, linewidth=1.8, label=series.name)


def _smoothed(y: np.ndarray, width: int) -> np.ndarray:
    """Centred moving average over `width` points, over fewer at the ends."""
    kernel = np.ones(width)
    return np.convolve(y, kernel, "same") / np.convolve(np.ones(len(y)), kernel, "same")
