"""Draws a row's answers as SVG: for each its thread tree, and below it when each thread ran.

matplotlib is imported here and nowhere else in the service, when something is drawn: it takes longer to import than
most commands take to run.
"""

import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

from jobs import store
from jobs.console import without_controls
from jobs.errors import Conflict, Unavailable

WIDTH_IN = 12.0
ROW_IN = 0.3
"""Height of a node and of a thread."""
FRAME_IN = 1.1
"""Height of a panel's title and axis."""
MAX_LABEL_CHARS = 110

_STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be read, searched and copied
    "svg.hashsalt": "forq",  # the same answer is the same file
    "text.usetex": False,
    "text.parse_math": False,  # an answer may hold dollar signs
    "font.size": 8,
}


def draw_request(value: dict[str, Any], target: Path) -> None:
    """Draw every sample of what `jobs.service.request_detail` says of a row; `target` appears only when it is whole.

    Raises:
        Conflict: the row has no tree to draw.
        Unavailable: the file cannot be written.
    """
    samples = [sample for sample in value["samples"] if sample["tree"]]
    if not samples:
        state = value["state"] if not value["samples"] else "answered by an engine that reports no trees"
        raise Conflict(f"row {value['row']} is {state}: there is no tree to draw")
    content = _draw(samples, f"row {value['row']}")
    temporary = store.temporary_beside(target)
    try:
        temporary.write_bytes(content)
        store.publish(temporary, target)
    except OSError as error:
        raise Unavailable(f"{target}: cannot be written ({error.strerror or error}): check space and rights") from None
    finally:
        temporary.unlink(missing_ok=True)


def _draw(samples: list[dict[str, Any]], title: str) -> bytes:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    heights = []
    for sample in samples:
        heights += [FRAME_IN + ROW_IN * len(sample["tree"]), FRAME_IN + ROW_IN * len(_threads(sample))]
    with rc_context(_STYLE), warnings.catch_warnings():
        # Its own font lacks glyphs of many scripts; whoever shows the file has them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=(WIDTH_IN, sum(heights)), layout="constrained")
        canvas = FigureCanvasSVG(figure)
        panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        for sample, tree, timeline in zip(samples, panels[::2], panels[1::2], strict=True):
            stats = sample["stats"] or {}
            tree.set_title(
                f"{title}, sample {sample['sample']}: {sample['output_tokens']} tokens, "
                f"{stats.get('threads')} threads, {stats.get('steps')} engine steps",
                loc="left",
            )
            _draw_tree(tree, sample["tree"])
            _draw_timeline(timeline, sample)
        out = BytesIO()
        canvas.print_figure(out, format="svg", metadata={"Date": None, "Creator": "forq"})
    return out.getvalue()


def _draw_tree(axes: Any, nodes: list[dict[str, Any]]) -> None:
    """An outline: a line for each node in restored order, details indented below what forked them."""
    places: dict[int, tuple[int, int]] = {}
    """Node → (indentation, line)."""
    for line, node in enumerate(nodes):
        indent = 0
        if node["parent"] is not None:
            above_indent, above_line = places[node["parent"]]
            is_detail = node["kind"] == "detail"
            indent = above_indent + is_detail
            x = above_indent + 0.12
            xs, ys = ([x, x, indent], [line, line]) if is_detail else ([x, x], [line - 0.35])
            axes.plot(xs, [above_line + 0.35, *ys], color="0.6", linewidth=0.8)
        places[node["node"]] = (indent, line)
        text = " ".join(without_controls(node["text"]).split())
        text = text if len(text) <= MAX_LABEL_CHARS else text[: MAX_LABEL_CHARS - 1] + "…"
        axes.text(
            indent, line, f" {node['thread']} · {node['end'] - node['start']} tokens · {text} ", va="center",
            bbox={"boxstyle": "round,pad=0.2", "facecolor": _colour(node), "edgecolor": "none", "alpha": 0.35},
            clip_on=False,
        )  # fmt: skip
    axes.set_xlim(-0.1, max(12.0, 2.0 + max(indent for indent, _ in places.values())))
    axes.set_ylim(len(nodes) - 0.5, -0.5)
    axes.set_axis_off()


def _draw_timeline(axes: Any, sample: dict[str, Any]) -> None:
    """A line for each thread, a bar for each of its nodes from its first to its last step, both included."""
    threads = _threads(sample)
    for node in sample["tree"]:
        steps = node["last_step"] - node["first_step"] + 1
        axes.barh(
            threads.index(node["thread"]), steps, left=node["first_step"], height=0.7, color=_colour(node), alpha=0.6,
            edgecolor="white", linewidth=0.8,
        )  # fmt: skip
    axes.set_yticks(range(len(threads)), [f"thread {number}" for number in threads])
    axes.set_ylim(len(threads) - 0.5, -0.5)
    axes.set_xlabel("engine steps since the first token")
    axes.spines[["top", "right"]].set_visible(False)


def _threads(sample: dict[str, Any]) -> list[int]:
    return sorted({node["thread"] for node in sample["tree"]})


def _colour(node: dict[str, Any]) -> str:
    return f"C{node['thread'] % 10}"
