# %% [markdown]
"""
# Scaling: which scales save a layer with outliers?

A scale maps values onto the range of FP8. One for a whole tensor is cheapest; one for a row, or for `128` values along K, follows
the values more closely; a static one comes from a calibration. **What does each cost on a real model, and where do outliers
break it?**

The model is SmolLM2-135M with its own activations; to look at yours, name its folder in `MODEL`. Everything here is the error of
quantisation alone: products are added exactly enough (`accumulation.ipynb` is about the sums).
"""

# %%
import warnings
from pathlib import Path
from statistics import median

import torch
from matplotlib import pyplot as plt

import fp8ref
from fp8ref import plots
from fp8ref.report.layers import choose_linears
from fp8ref.report.model import first_tokens, load_model, read_text
from fp8ref.report.results import snr_db

warnings.filterwarnings("ignore", message="IProgress")  # transformers' bar wants another package in a notebook
MODEL = None  # or "a/folder/of/yours"
plots.use_style()
loaded = load_model(MODEL and Path(MODEL))
model = loaded.module.eval()
tokens = first_tokens(loaded.tokenizer, read_text(None)[0], 384)
sample, text = tokens[:256], tokens[256:]  # the first is for calibration, the second for measuring
linears, _ = choose_linears(model, include_head=False)


def capture(ids):
    """The input [tokens, K] of every linear layer."""
    seen = {}
    hooks = [
        linear.register_forward_pre_hook(lambda _, inputs, name=name: seen.update({name: inputs[0][0]}))
        for name, linear in linears.items()
    ]
    with torch.no_grad():
        model(input_ids=ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


inputs = capture(text)
weights = {name: linear.weight.detach() for name, linear in linears.items()}
len(inputs), loaded.name

# %% [markdown]
"""
## How far values spread

The largest value over the rms value of each layer's weight and input. Weights are tame. The input of `down_proj` is not: in some layers
one value is hundreds of times the rms.
"""


# %%
def spread(x):
    """Largest magnitude over root mean square."""
    return float(x.abs().max() / x.square().mean().sqrt())


spreads = {
    "input": {name: spread(x) for name, x in inputs.items()},
    "weight": {name: spread(w) for name, w in weights.items()},
}
figure, axes = plt.subplots(figsize=(plots.PAGE_WIDTH, 2.8))
plots.draw_layers(spreads, axes)
axes.set_yscale("log")
axes.set_ylabel("largest value / rms")
axes.legend(loc="upper left")
plt.show()

worst = max(spreads["input"], key=spreads["input"].get)
widest = spreads["input"][worst], max(spreads["weight"].values())
x, w = inputs[worst], weights[worst]
print(worst)

# %% [markdown]
"""
The widest is the input of `layers.28.mlp.down_proj`: its largest value is 431<!--= {widest[0]:.0f} --> times its rms; of weights the widest has 51<!--= {widest[1]:.0f} -->.

## Outliers: a token and a few channels

The same input, seen along its tokens and along its channels.
"""

# %%
figure, (left, right) = plt.subplots(1, 2, sharey=True)
left.plot(x.abs().amax(1), color="black", linewidth=0.8, marker=".", markersize=3)
left.set(xlabel="token", ylabel="largest magnitude")
right.plot(x.abs().amax(0), color="black", linewidth=0.5)
right.set(xlabel="channel (of K)")
left.set_yscale("log")
figure.suptitle(worst, fontsize=9)
plt.show()
by_token, by_channel = x.abs().amax(1).sort(descending=True).values, x.abs().amax(0).sort(descending=True).values
usual_size = float(x[1:].abs().median())
shared = float(x.abs().max()) / fp8ref.E4M3.max

# %% [markdown]
"""
The first token, on which attention rests when it has nothing to look at (an attention sink, `arXiv 2309.17453`), reaches 2,381<!--= {by_token[0]:,.0f} -->, in one channel; no other token exceeds 55.5<!--= {by_token[1]:.1f} -->. One scale for the whole
tensor is then 5.3<!--= {shared:.1f} -->, and the other tokens, whose median magnitude is 0.2<!--= {usual_size:.1f} -->, have to live at the lower end of e4m3. A scale for each token
("row") is not touched by its neighbours.

## Signal-to-noise ratio of every layer

`x @ w.t()` of the quantised operands against that of the original ones, over all tokens of a layer together. Scales are written input by weight;
one word stands for both.
"""

# %%
calibration = fp8ref.calibrate(model, [{"input_ids": sample[None], "use_cache": False}], "tensor-static", show=False)
SCHEMES = {
    "tensor, static": fp8ref.RECIPES["tensor-static"],
    "tensor": fp8ref.RECIPES["tensor"],
    "row": fp8ref.RECIPES["row"],
    "1x128 by 128x128": fp8ref.RECIPES["block"],
    "1x128 by 1x128": fp8ref.Recipe("1x128", "1x128"),
    "tensor, ue8m0": fp8ref.Recipe("tensor", "tensor", scale_format="ue8m0"),
    "1x128 by 128x128, ue8m0": fp8ref.RECIPES["block-ue8m0"],
    "row, e5m2 inputs": fp8ref.Recipe(activation_dtype=torch.float8_e5m2),
}


def quantised(x, dtype, scaling, scale_format, **static):
    """What FP8 makes of x, and the shares of its values that became zero, and that were clipped."""
    q = fp8ref.quantize(x, dtype, scaling=scaling, scale_format=scale_format, **static)
    y = fp8ref.dequantize(q)
    clipped = (x.abs() > static["scale"] * fp8ref.format_of(dtype).max).sum() if static else 0
    return y, float(((y == 0) & (x != 0)).sum()) / x.numel(), float(clipped) / x.numel()


def measure(name):
    """Per scheme, of one layer: the ratio in dB over all tokens and of the median token, shares of zeros and clipped."""
    x, w = inputs[name], weights[name]
    truth = x @ w.t()
    signal, found, done = truth.square(), {}, {}
    for scheme, recipe in SCHEMES.items():
        static = {} if recipe.dynamic else {"scale": calibration[name]}
        qx, zeros, clipped = quantised(
            x, recipe.activation_dtype, recipe.activation_scaling, recipe.scale_format, **static
        )
        kind = recipe.weight_dtype, recipe.weight_scaling, recipe.scale_format
        if kind not in done:
            done[kind], *_ = quantised(w, *kind)
        noise = (qx @ done[kind].t() - truth).square()
        of_token = median(map(snr_db, signal.sum(1).tolist(), noise.sum(1).tolist()))
        found[scheme] = (snr_db(float(signal.sum()), float(noise.sum())), of_token, zeros, clipped)
    return found


layers = {name: measure(name) for name in linears}
results = {scheme: {name: found[scheme] for name, found in layers.items()} for scheme in SCHEMES}


# %%
def column(scheme, index):
    """One of the four figures, by layer."""
    return {name: values[index] for name, values in results[scheme].items()}


figure, (upper, lower) = plt.subplots(2, 1, figsize=(plots.PAGE_WIDTH, 5.0), sharex=True)
plots.draw_layers(
    {scheme: column(scheme, 0) for scheme in ("tensor, static", "tensor", "row", "1x128 by 128x128")}, upper
)
plots.draw_layers(
    {scheme: column(scheme, 0) for scheme in ("1x128 by 128x128", "1x128 by 128x128, ue8m0", "row, e5m2 inputs")}, lower
)
for axes in (upper, lower):
    axes.set_ylabel("signal-to-noise ratio (dB)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
upper.set_xlabel("")
plt.show()

# %%
rows = []
for scheme, found in results.items():
    total, of_token, zeros, clipped = zip(*found.values(), strict=True)
    rows.append([
        scheme, f"{median(total):.1f}", f"{min(total):.1f}", f"{median(of_token):.1f}", f"{min(of_token):.1f}",
        f"{100 * max(zeros):.2f}", f"{100 * max(clipped):.4f}",
    ])  # fmt: skip
plots.Table(
    ["scales (input by weight)", "dB, median layer", "dB, worst layer", "dB of the median token, median layer", "the same, worst layer",
     "% of inputs to zero, worst layer", "% of inputs clipped, worst layer"],
    rows,
)  # fmt: skip

# %%
DYNAMIC = ("tensor", "row", "1x128 by 128x128")


def best(scheme, index, choose=median):
    """The median layer's figure, or another's."""
    return choose(column(scheme, index).values())


failed = min(column("tensor, static", 0), key=column("tensor, static", 0).get)
past = float(inputs[failed].abs().max()) / (calibration[failed] * fp8ref.E4M3.max)
lowest = min(best(scheme, 0, min) for scheme in DYNAMIC)
one_scale, blocks = (column(scheme, 0).values() for scheme in ("tensor, ue8m0", "1x128 by 128x128, ue8m0"))
apart = median(abs(a - b) for a, b in zip(one_scale, blocks, strict=True))
assert (
    MODEL is not None or int(inputs[failed].abs().amax(1).argmax()) == 0
)  # the first token is the one that is clipped
print(failed)

# %% [markdown]
"""
- **Dynamic scales all work.** The median layer has 29.8 dB<!--= {best("tensor", 0):.1f} dB --> with one scale per tensor, 30.3 dB<!--= {best("row", 0):.1f} dB --> with rows and 30.4 dB<!--= {best("1x128 by 128x128", 0):.1f} dB --> with blocks; the lowest of all layers is
  26.5 dB<!--= {lowest:.1f} dB -->. e4m3 is a floating-point format: moving a value to a lower octave costs nothing until it reaches the subnormals.
- **That is why powers of two ("ue8m0") lose what finer scales gain**: with them one scale and blocks differ by 0.00 dB<!--= {apart:.2f} dB --> in the median layer. What fp32 scales win is
  that each group's largest value, which weighs most, falls on a code exactly.
- **Zeros show the strain before the ratio does**: with one scale for the tensor up to 9.6 %<!--= {100 * best("tensor", 2, max):.1f} % --> of a layer's inputs become zero, with rows 0.2 %<!--= {100 * best("row", 2, max):.1f} % -->.
- **A static scale breaks.** `layers.1.mlp.down_proj` falls to 8.8 dB<!--= {best("tensor, static", 0, min):.1f} dB -->: in this text its outlier is 2.71<!--= {past:.2f} --> times the largest value of the calibration, and is
  clipped. No layer has more than 0.019 %<!--= {100 * best("tensor, static", 3, max):.3f} % --> of its inputs clipped, but those carry the signal. The median token does not notice (26.0 dB<!--= {best("tensor, static", 1, min):.1f} dB --> in the worst layer); the first token does.
- **e5m2 for inputs** costs 3.8 dB<!--= {best("row", 0) - best("row, e5m2 inputs", 0):.1f} dB -->: range is not what is missing here.

## How large may an outlier become?

This model's outliers fit into e4m3's range. Those of other models may be larger, so here one token (left) or one channel (right) of a tame layer
is multiplied by a growing factor. What is drawn is the ratio of all that is *not* the outlier: of the other tokens, and of the outputs without
the outlier channel's share.
"""

# %%
tame = "model.layers.15.mlp.down_proj" if MODEL is None else min(spreads["input"], key=spreads["input"].get)
x, w = inputs[tame], weights[tame]
factors = [2.0**n for n in range(0, 25, 2)]
GRAINS = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "1x128 by 128x128": ("1x128", "128x128")}


def rest(grain, token=None, channel=None, factor=1.0):
    """The ratio in dB of everything but the outlier."""
    of_x, of_w = GRAINS[grain]
    large, left = x.clone(), x.clone()
    chosen = (slice(None), channel) if token is None else token
    large[chosen] *= factor
    left[chosen] = 0
    q, *_ = quantised(large, torch.float8_e4m3fn, of_x, "float32")
    q[chosen] = 0
    qw, *_ = quantised(w, torch.float8_e4m3fn, of_w, "float32")
    truth = left @ w.t()
    return snr_db(float(truth.square().sum()), float((q @ qw.t() - truth).square().sum()))


usual = int(x.abs().amax(0).argsort()[x.shape[1] // 2])  # a channel like most
by_factor = {
    where: {grain: [rest(grain, factor=factor, **which) for factor in factors] for grain in GRAINS}
    for where, which in {"an outlier token": {"token": 5}, "an outlier channel": {"channel": usual}}.items()
}
figure, panels = plt.subplots(1, 2, sharey=True)
for axes, (where, found) in zip(panels, by_factor.items(), strict=True):
    plots.draw_series(factors, found, axes)
    axes.set(title=where, xlabel="its values times")
    axes.set_xscale("log", base=2)
panels[0].set_ylabel("signal-to-noise ratio of the rest (dB)")
panels[0].legend(loc="lower left")
plt.show()


def breaks(where, grain):
    """The first factor at which 3 dB are lost."""
    found = by_factor[where][grain]
    return next((int(f) for f, db in zip(factors, found, strict=True) if db < found[0] - 3), None)


limit = {(where, grain): breaks(where, grain) for where in by_factor for grain in GRAINS}
assert limit["an outlier token", "row"] is limit["an outlier token", "1x128 by 128x128"] is None
block_end = by_factor["an outlier channel"]["1x128 by 128x128"]

# %% [markdown]
"""
One scale per tensor loses `3 dB` when an outlier token is 16,384<!--= {limit["an outlier token", "tensor"]:,} --> times as large as usual, or an outlier channel 16,384<!--= {limit["an outlier channel", "tensor"]:,} --> times; then the rest drowns. Rows isolate tokens completely, channels hardly: they are in every row, and
`3 dB` are lost at a factor of 65,536<!--= {limit["an outlier channel", "row"]:,} -->. Blocks along K confine a channel to its `128` neighbours, so that of 30.0 dB<!--= {block_end[0]:.1f} dB --> there remain 10.7 dB<!--= {rest("1x128 by 128x128", channel=usual, factor=2.0**60):.1f} dB --> however large it becomes.

## The answer

With dynamic scales even one scale per tensor keeps every layer of this model at 26.5 dB<!--= {lowest:.1f} dB --> or more; a scale per token makes outlier tokens harmless and blocks confine outlier channels, but powers of two
give away the little that finer scales win.
What breaks layers is a static scale: a calibration that misses the largest outlier clips it, and a layer falls to 8.8 dB<!--= {best("tensor, static", 0, min):.1f} dB -->.
"""
