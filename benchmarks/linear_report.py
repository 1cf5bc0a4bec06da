"""What is made of the figures of linear.py: the project's targets, a table and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPES = [(1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192)]
ODD = {(4097, 4099): (4096, 4096), (14335, 4095): (14336, 4096)}
SMALL = [1, 2, 4, 8, 15]
LARGE = [64, 256, 1024, 4096]


def targets(rows: list[dict[str, Any]], bandwidth: float) -> list[dict[str, Any]]:
    """Return each target with what was reached; against the same product, row-wise, and against a tensor-wise one."""
    by = {(r["n"], r["k"], r["m"]): r for r in rows}
    found: list[dict[str, Any]] = []

    def add(name: str, row: dict[str, Any], limit: float) -> None:
        where, ours = f"{row['n']}x{row['k']} M={row['m']}", row["ours"]
        found.append({"target": name, "at": where, "ours": ours, "limit": round(limit, 2), "hit": ours <= limit})

    for (n, k, m), row in by.items():
        for bare in ("_scaled_mm row-wise", "_scaled_mm tensor-wise"):
            if (n, k) in SHAPES and m in SMALL:
                slack, words = (1.03, "within 3 % of") if (n, k) == SHAPES[-1] else (1.0, "no slower than")
                add(f"{words} bare {bare}", row, slack * row[bare])
            if (n, k) in SHAPES and m in LARGE:
                limit = 1.1 * (row[bare] + 3 * m * k / bandwidth)
                add(f"at most 1.10 x ({bare} + quantisation at copy bandwidth)", row, limit)
        if m in SMALL and (n, k) in SHAPES[2:4]:
            add("at most 1.15 x the pure read", row, 1.15 * row["pure read"])
            add("at least 1.8 x bf16", row, row["bf16"] / 1.8)
        if (n, k) in ODD:
            add("odd: at most 1.10 x the aligned neighbour", row, 1.1 * by[(*ODD[n, k], m)]["ours"])
    return found


def table(found: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    e = found["environment"]
    names = ["pure read", "bf16", "_scaled_mm tensor-wise", "_scaled_mm row-wise", "quantise per call, eager",
             "quantise per call, graph", "quantise per call, compiled in a graph", "torchao dynamic per-row",
             "FBGEMM quantise + rowwise", "FBGEMM quantise + gemv", "ours", "ours ready fp8",
             "ours fast accumulation", "ours batch invariant"]  # fmt: skip
    lines = [f"{e['gpu']}, torch {e['torch']}, triton {e['triton']}, CUDA {e['cuda']}, {e['date']}; microseconds", ""]
    lines += ["| N x K | M | " + " | ".join(names) + " | ours / bare, isolated |", "|" + "---|" * (len(names) + 3)]
    for row in found["rows"]:
        alone = row.get("isolated", {})
        both = f"{alone['ours']} / {alone['_scaled_mm tensor-wise']}" if alone else ""
        cells = " | ".join(str(row.get(name, "")) for name in names)
        lines.append(f"| {row['n']} x {row['k']} | {row['m']} | {cells} | {both} |")
    for name in sorted({t["target"] for t in found["targets"]}):
        mine = [t for t in found["targets"] if t["target"] == name]
        missed = [f"{t['at']} {t['ours']} > {t['limit']}" for t in mine if not t["hit"]]
        lines.append(f"- {name}: {len(mine) - len(missed)} of {len(mine)} hit. " + "; ".join(missed))
    lines += ["", *(f"- {name}: {why}" for name, why in found["not measured"].items())]
    return "\n".join(lines) + "\n"


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw the time of each layer at M = 1 and 15 over the measured roof, the pure read."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [r for r in found["rows"] if r["m"] in (1, 15) and "pure read" in r and (r["n"], r["k"]) in SHAPES]
    labels = [f"{r['n']}x{r['k']}\nM={r['m']}" for r in rows]
    fig, axes = plt.subplots(figsize=(11, 4.5))
    series = ["bf16", "quantise per call, graph", "_scaled_mm tensor-wise", "ours"]
    looks = (("white", "///"), ("white", "..."), ("lightgrey", ""), ("black", ""))
    for j, (name, (colour, hatch)) in enumerate(zip(series, looks, strict=True)):
        heights = [r[name] / r["pure read"] for r in rows]
        at = [i + 0.2 * j for i in range(len(rows))]
        # matplotlib leaves labels that begin with an underscore out of its legend.
        label = f"torch.{name}" if name.startswith("_") else name
        axes.bar(at, heights, 0.2, label=label, color=colour, hatch=hatch, edgecolor="black")
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--", label="pure read of the weights")
    axes.set_xticks([i + 0.3 for i in range(len(rows))], labels, fontsize=7)
    axes.set_ylabel("time / pure read of the weights")
    axes.legend()
    fig.tight_layout()
    fig.savefig(path, dpi=110)
