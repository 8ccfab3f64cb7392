"""Line charts and histograms, as inline SVG in the colours of the page's theme, or as PNG for places without CSS."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Callable, Sequence
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
        """An `<svg>` element in the page's colours."""
        return _svg(self._draw, self.title)

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
        _dress(axes, self.x_label, self.y_label)
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


@dataclass(frozen=True)
class Histogram:
    """Rows by length, in bins that double: (upper edge in tokens, a power of two, rows), with the limit marked."""

    title: str
    bins: Sequence[tuple[int, int]]
    limit: int | None = None

    def svg(self) -> str:
        """An `<svg>` element in the page's colours."""
        return _svg(self._draw, self.title)

    def _draw(self) -> Figure:
        figure = Figure(figsize=(5.6, 1.9), layout="constrained")
        axes = figure.add_subplot()
        # A bin reaches from half its edge to its edge; on a scale of doublings all are one wide.
        ends = [math.log2(edge) for edge, _ in self.bins]
        axes.bar(ends, [count for _, count in self.bins], width=-0.94, align="edge", color=COLOURS[0])
        _dress(axes, "tokens", "rows")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        ticks = range(math.floor(min(ends)) - 1, math.ceil(max(ends)) + 1)
        step = 1 if len(ticks) <= 14 else 2
        axes.set_xticks(ticks[::step], [_power_of_two(tick) for tick in ticks[::step]])
        if self.limit is not None and (place := math.log2(self.limit)) <= ticks[-1]:
            is_left = place < (ticks[0] + ticks[-1]) / 2
            axes.axvline(place, color=COLOURS[1], linewidth=1.2, linestyle=(0, (3, 2)))
            axes.annotate(
                f"limit {self.limit:,}",
                (place, 1),
                xycoords=("data", "axes fraction"),
                xytext=(4 if is_left else -4, -8),
                textcoords="offset points",
                ha="left" if is_left else "right",
                color=COLOURS[1],
                fontsize=8,
            )
        return figure


def _power_of_two(power: int) -> str:
    """2 to the power, in a few characters: 512, 2k, 16k, 1M; 0 for the lower edge of the first bin."""
    if power < 0:
        return "0"
    for unit, size in (("M", 20), ("k", 10)):
        if power >= size:
            return f"{2 ** (power - size)}{unit}"
    return str(2**power)


def _dress(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    # Upright above the axis: set sideways it runs into the tick labels when the page's font is wider than ours.
    axes.set_title(y_label, loc="left", color=MUTED, fontsize=8.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)


def _svg(draw: Callable[[], Figure], salt: str) -> str:
    """A figure as an `<svg>` element without ids, sizes or colours of its own that could clash with the page's.

    Args:
        salt: makes the ids of one figure differ from another's, and equal from run to run.
    """
    buffer = io.StringIO()
    with mpl.rc_context(STYLE | {"svg.hashsalt": salt}):
        draw().savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', text, count=1)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text.replace("xlink:href", "href")
