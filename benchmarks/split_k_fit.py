"""Grows the trees of ``fp8ref.split_k``: ``python benchmarks/split_k_fit.py FOLDER``; needs scikit-learn.

FOLDER is what split_k_map.py wrote, with ``bulk.npz`` of split_k_bulk.py beside it. The samples ``fresh`` are left out:
they judge (split_k_holdout.py). Only fast accumulation is fitted: without it one answer in 1,250 was another.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.tree import DecisionTreeClassifier
from split_k_shapes import KINDS, near

from fp8ref.emulation.split_k import LEAST_TILES, TABLE, TILES, WORKSPACE, describe

LEAF = 255
TREES = {"a": {"random_state": 0}, "b": {"random_state": 1, "max_features": 0.4}}


def features(shapes: Any) -> Any:
    """What ``describe`` gives, for many shapes at once."""
    m, n, k = (column.astype(np.int64) for column in shapes.T)
    rows = describe_all(m, n, k)
    return np.stack(rows, axis=1).astype(np.float32)


def walk_all(table: dict[str, Any], name: str, rows: Any) -> Any:
    """Answers of a flattened tree for many rows of features."""
    feature, threshold, right = (table[f"{name}.{part}"] for part in ("feature", "threshold", "right"))
    nodes = np.zeros(len(rows), dtype=np.int64)
    while True:
        inner = feature[nodes] != LEAF
        if not inner.any():
            return threshold[nodes]
        value = rows[np.arange(len(rows)), np.where(inner, feature[nodes], 0)]
        step = np.where(value <= threshold[nodes], nodes + 1, right[nodes])
        nodes = np.where(inner, step, nodes)


def describe_all(m: Any, n: Any, k: Any) -> list[Any]:
    """``fp8ref.emulation.split_k.describe`` on arrays: Python's min does not take them."""
    tiles = -(-k // 128)
    most, room = (tiles - 1) // 20, np.minimum(WORKSPACE // (4 * m * n), 63)
    found = [m, n, tiles, k, most, room, m * n, k % 128, n % 64, np.minimum(most, room)]
    found += [-(-m // rows) * -(-n // columns) for rows, columns in TILES]
    found += [-(-m // rows) for rows in (8, 16, 24, 32, 40, 48, 64)]
    return found + [-(-n // columns) for columns in (16, 32, 64, 128, 192, 256)]


def recorded(folder: Path, kind: str) -> tuple[Any, Any]:
    """Shapes and numbers of parts of one kind of call, within the bounds, no sample named fresh among them."""
    shapes, parts = [], []
    names = {"bf16-fast": ["near", "more", "wide", "line-k", "line-m", "line-n", "line-grid"]}.get(kind, [])
    out, mode = kind.split("-")
    plain = {"e4m3+bf16": "e4m3"}.get(out, out)
    names += [f"near-{plain}-{mode}-{'bias' if '+' in out else 'plain'}"]
    names += [f"near-{plain}-{mode}-bias"] if out in ("bf16", "fp16") else []
    names += [f"line-{line}-accurate" for line in ("k", "m", "n", "grid")] if kind == "bf16-accurate" else []
    for name in names:
        path = folder / f"{name}.npz"
        if path.exists():
            found = np.load(path)
            shapes.append(found["shape"].astype(np.int64))
            parts.append(found["table"][found["algo"]][:, 2])
    bulk = folder / "bulk" / "bulk.npz"
    if bulk.exists():
        file = np.load(bulk)
        for name in file.files:
            found_kind, generator, *rest = name.split(".")
            if found_kind == kind and generator == "near" and rest[-1] != "sha":
                count, seed, index = (int(word) for word in rest)
                drawn = near(count, seed)
                digest = str(file[f"{kind}.near.{count}.{seed}.sha"])
                assert hashlib.sha256(drawn.tobytes()).hexdigest() == digest, "this numpy draws other shapes"
                workers = 1 + max(
                    int(x.rsplit(".", 1)[1])
                    for x in file.files
                    if x.startswith(f"{kind}.near.{count}.{seed}.") and not x.endswith("sha")
                )
                answers = file[name]
                start = count * index // workers
                shapes.append(drawn[start : start + len(answers)])
                parts.append(answers)
    every, answers = np.concatenate(shapes), np.concatenate(parts).astype(np.int64)
    m, n, k = every.T
    within = (8 * m * n <= WORKSPACE) & (-(-k // 128) >= LEAST_TILES) & (answers < LEAF)
    assert (answers[~within & (answers < LEAF)] == 1).all(), "a cut beyond the bounds"
    return every[within], answers[within]


def flatten(tree: Any, classes: Any) -> dict[str, Any]:
    """Nodes in the order left child first: feature, threshold or answer, right child."""
    order, stack = [], [0]
    while stack:
        node = stack.pop()
        order.append(node)
        if tree.children_left[node] >= 0:
            stack += [tree.children_right[node], tree.children_left[node]]
    place = {node: index for index, node in enumerate(order)}
    leaf = tree.children_left[order] < 0
    answers = classes[tree.value[order][:, 0].argmax(axis=1)]
    thresholds = np.where(leaf, answers, np.floor(tree.threshold[order]))
    right = [0 if end else place[tree.children_right[node]] for node, end in zip(order, leaf, strict=True)]
    return {
        "feature": np.where(leaf, LEAF, tree.feature[order]).astype(np.uint8),
        "threshold": thresholds.astype(np.int32),
        "right": np.array(right, dtype=np.int32),
    }


def main() -> None:
    """Grow two trees for every kind of call and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="*", default=[kind for kind, _ in KINDS if kind.endswith("fast")])
    options = parser.parse_args()
    assert describe(5, 208, 51216) == [int(x[0]) for x in describe_all(*(np.array([v]) for v in (5, 208, 51216)))]
    table: dict[str, Any] = dict(np.load(TABLE)) if TABLE.exists() else {}
    table = {name: values for name, values in table.items() if name.split(".")[0].endswith("fast")}
    for kind in options.kinds:
        shapes, parts = recorded(options.folder, kind)
        rows = features(shapes)
        if not kind.startswith("bf16"):
            # bf16 has the most answers and is mostly the same: its tree is one more feature.
            rows = np.c_[rows, walk_all(table, "bf16-fast.a", rows)].astype(np.float32)
        for name, settings in TREES.items():
            grown = DecisionTreeClassifier(**settings).fit(rows, parts)
            flat = flatten(grown.tree_, grown.classes_)
            table |= {f"{kind}.{name}.{part}": values for part, values in flat.items()}
            print(f"{kind} {name}: {len(parts)} answers, {grown.tree_.node_count} nodes", flush=True)
        np.savez_compressed(TABLE, **table)
    print(f"{TABLE.name}: {TABLE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
