# %% [markdown]
"""
# Rounding: what becomes of a number that FP8 must hold?

An FP8 format has 256<!--= {len(codes)} --> codes. Everything else is rounded to one of them, and how depends on who rounds: the nearest
code or a random one of the two neighbours, saturation or overflow, one rounding or two. **How large is the error, where is it
largest, and do libraries agree?**
"""

# %%
from importlib.metadata import version

import gfloat
import ml_dtypes
import numpy as np
import torch
from gfloat.formats import format_info_ocp_e4m3, format_info_ocp_e5m2
from matplotlib import pyplot as plt

import fp8ref
from fp8ref import plots

plots.use_style()
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
codes = torch.arange(256, dtype=torch.uint8)
plots.Table(["package", "version"], [[name, version(name)] for name in ("torch", "ml_dtypes", "gfloat", "numpy")])

# %% [markdown]
"""
## The number lines

e4m3 has 3<!--= {fp8ref.E4M3.mantissa_bits} --> bits behind the leading one, e5m2 has 2<!--= {fp8ref.E5M2.mantissa_bits} -->. Within a power of two the values are evenly
spaced; each higher power of two doubles the spacing. Below the smallest normal number the spacing stays as it is: those are
the subnormals, drawn short and dashed.
"""

# %%
figure, (top, middle, low) = plt.subplots(3, 1, figsize=(plots.PAGE_WIDTH, 3.2))
plots.draw_number_line(E4M3, top, high=4.0)
plots.draw_number_line(E5M2, middle, high=4.0)
plots.draw_number_line(E4M3, low, high=2.0**-5)
low.set_xlabel("value")
plt.show()

# %% [markdown]
"""
On a logarithmic axis both look alike in the middle. e5m2 pays for its range with a bit of precision.
"""

# %%
figure, panels = plt.subplots(2, 1, figsize=(plots.PAGE_WIDTH, 2.4), sharex=True)
for dtype, axes in zip((E4M3, E5M2), panels, strict=True):
    plots.draw_number_line(dtype, axes, log=True)
    axes.set_xlim(2.0**-17, 2.0**17)
axes.set_xlabel("value")
plt.show()

# %% [markdown]
"""
## Error against magnitude

The largest relative error within each octave (saturating, to nearest even). The flat part is half a step at the lower end of an octave: `1/17` in e4m3 is
5.88 %<!--= {100 * flat[E4M3]:.2f} % -->, `1/9` in e5m2 is 11.11 %<!--= {100 * flat[E5M2]:.2f} % -->. On the left the subnormals lose a bit for every octave until everything becomes zero
(an error of 100 %<!--= {100 * float(zeroed):.0f} % -->); on the right everything saturates.
"""


# %%
def relative_error(x, dtype):
    """Of values that fp8ref rounds to nearest even, saturating."""
    return (fp8ref.round_to_fp8(x, dtype).double() - x).abs() / x


octave = torch.linspace(1, 2, 1025, dtype=torch.float64)[:-1]
flat = {dtype: float(relative_error(octave, dtype).max()) for dtype in (E4M3, E5M2)}
zeroed = relative_error(torch.tensor([2.0**-11], dtype=torch.float64), E4M3)

axes = plots.draw_rounding_error(E4M3, E5M2)
for fmt in fp8ref.FORMATS.values():
    axes.annotate(
        f"largest {fmt.name}: {fmt.max:g} ", (fmt.max, 0.42), ha="right", fontsize=8, rotation=90, va="center"
    )
    axes.axvline(fmt.max, color="0.5", linewidth=0.8)
axes.legend(loc="lower left")
plt.show()

# %% [markdown]
"""
So a tensor has to be scaled into the flat part, and a tensor whose values spread over more than its
15<!--= {flat_octaves[E4M3]} --> octaves in e4m3 (30<!--= {flat_octaves[E5M2]} --> in e5m2) does not fit into it whole: that is what block scales are for (see `scaling.ipynb`).
"""

# %%
flat_octaves = {fmt.dtype: fmt.e_max - fmt.e_min + 1 for fmt in fp8ref.FORMATS.values()}

# %% [markdown]
"""
## Nearest or stochastic

To nearest, a value between two codes always goes the same way: the error of one value is least, but the errors of a sum may
all point in one direction. Stochastic rounding goes up with a probability equal to the distance travelled, so its *mean* is right.
Right: `2^-7` is added to `1` five hundred times, with the sum held in e4m3. To nearest it never moves.
"""

# %%
generator = torch.Generator().manual_seed(0)
x = torch.linspace(1.0, 1.5, 201)
nearest = fp8ref.round_to_fp8(x, E4M3).float()
many = fp8ref.round_to_fp8(x.expand(2000, -1), E4M3, rounding="stochastic", generator=generator).float()

steps, increment = 500, 2.0**-7
held = torch.ones(9)  # row 0 to nearest, the others stochastic
walk = [held]
for _ in range(steps):
    sums = held + increment
    up = fp8ref.round_to_fp8(sums, E4M3, rounding="stochastic", generator=generator).float()
    held = torch.cat([fp8ref.round_to_fp8(sums[:1], E4M3).float(), up[1:]])
    walk.append(held)
walk = torch.stack(walk)

figure, (left, right) = plt.subplots(1, 2)
left.plot(x, nearest, color="black", label="nearest even")
left.plot(x, many.mean(0), color="0.4", linestyle=":", linewidth=2, label="stochastic, mean of 2000")
left.set(xlabel="value", ylabel="rounded to e4m3")
left.legend(loc="upper left")
right.plot(walk[:, 1:], color="0.6", linewidth=0.7)
right.plot([], [], color="0.6", linewidth=0.7, label="stochastic, 8 runs")
right.plot(walk[:, 0], color="black", label="nearest even")
right.plot([0, steps], [1, 1 + steps * increment], color="black", linestyle="--", label="exact")
right.set(xlabel="additions", ylabel="sum held in e4m3")
right.legend(loc="upper left")
plt.show()
stuck, mean_end, exact_end = walk[-1, 0], walk[-1, 1:].mean(), 1 + steps * increment
worst_bias = (many.mean(0) - x).abs().max()

# %% [markdown]
"""
The exact sum is 4.91<!--= {exact_end:.2f} -->; to nearest it stays at 1.00<!--= {stuck:.2f} -->, the mean of the eight stochastic runs is 5.03<!--= {mean_end:.2f} -->. On the left
the mean of stochastic rounding is nowhere further than 0.0042<!--= {worst_bias:.4f} --> from the value, a fraction of the step of 0.125<!--= {2.0**-fp8ref.E4M3.mantissa_bits:.3f} -->.

## Rounding twice

float64 to FP8 through float32 rounds twice. `1.0625` lies exactly between `1.0` and `1.125`, and a tie goes to the even code,
`1.0`. A hair more must go up, but the first rounding to float32 removes the hair and the second sees a tie.
"""

# %%
hair = np.array([1.0625 + 2.0**-40])


def by_torch(values, dtype):
    """The values after torch's own conversion."""
    return torch.from_numpy(values).to(dtype).double().numpy()


def by_fp8ref(values, dtype, **options):
    """The values after fp8ref's rounding."""
    return fp8ref.round_to_fp8(torch.from_numpy(values), dtype, **options).double().numpy()


def by_ml_dtypes(values, dtype):
    """The values after ml_dtypes' conversion; NumPy's warning of an overflow says what the table shows."""
    with np.errstate(all="ignore"):
        return values.astype(ml_dtypes.float8_e4m3fn if dtype == E4M3 else ml_dtypes.float8_e5m2).astype(np.float64)


def by_gfloat(values, dtype, **options):
    """The values after gfloat's rounding."""
    return gfloat.round_ndarray(format_info_ocp_e4m3 if dtype == E4M3 else format_info_ocp_e5m2, values, **options)


once = {"fp8ref": by_fp8ref, "gfloat": by_gfloat, "torch .to": by_torch, "ml_dtypes": by_ml_dtypes}
twice = {name: float(rounded(hair, E4M3)[0]) for name, rounded in once.items()}
plots.Table(["1.0625 + 2^-40 in float64", "in e4m3"], [[name, f"{value:g}"] for name, value in twice.items()])

# %% [markdown]
"""
fp8ref gives 1.125<!--= {twice["fp8ref"]:.3f} -->, as do gfloat and this version of ml_dtypes; torch gives 1.0<!--= {twice["torch .to"]:.1f} -->, which is the wrong neighbour. In random data this is rare: it
needs a value within half a float32 step of a tie. In data made of few bits, such as sums of FP8 products, it is not: next to every
tie of e4m3 from `1` to `448`, half of all hairs go wrong in torch.
"""

# %%
grid = fp8ref.E4M3.dtype
exactly = torch.arange(0x38, 0x7F, dtype=torch.uint8).view(grid).double().numpy()  # the codes from 1 to 448
ties = (exactly[:-1] + exactly[1:]) / 2
hairs = np.concatenate([ties * (1 + 2.0**-40), ties * (1 - 2.0**-40)])
wrong = {name: int((rounded(hairs, E4M3) != by_fp8ref(hairs, E4M3)).sum()) for name, rounded in once.items()}
assert wrong["torch .to"] * 2 == len(hairs)
assert wrong["gfloat"] == wrong["ml_dtypes"] == 0
plots.Table(["library", f"wrong of {len(hairs)}"], [[name, str(count)] for name, count in wrong.items()])

# %% [markdown]
"""
## At the edges

What an input beyond the largest code or below the smallest becomes, run live with the versions above. `fp8ref` has both behaviours, on every
version of torch; "saturating" is the hardware's `cvt.rn.satfinite`.
"""

# %%
everyone = {
    "fp8ref": by_fp8ref,
    "fp8ref, saturate=False": lambda x, dtype: by_fp8ref(x, dtype, saturate=False),
    "torch .to": by_torch,
    "ml_dtypes": by_ml_dtypes,
    "gfloat": by_gfloat,
    "gfloat, sat=True": lambda x, dtype: by_gfloat(x, dtype, sat=True),
}


def edge_table(dtype, inputs):
    """One row an input, one column a library."""
    results = [rounded(np.array(inputs), dtype) for rounded in everyone.values()]
    rows = [[f"{x:.10g}", *(f"{column[row]:.10g}" for column in results)] for row, x in enumerate(inputs)]
    return plots.Table([f"to {fp8ref.format_of(dtype).name}", *everyone], rows)


inf, nan = float("inf"), float("nan")
edge_table(E4M3, [448.0, 463.9, 464.0, 464.1, 480.0, 1e9, inf, -inf, nan, 2.0**-10, 1.001 * 2.0**-10, -1e-9])

# %%
edge_table(E5M2, [57344.0, 61439.9, 61440.0, 1e9, inf, -inf, nan, 2.0**-17, 1.001 * 2.0**-17, -1e-9])

# %%
inside = torch.cat([torch.linspace(-448, 448, 200_001), torch.logspace(-6, 2, 100_000)]).double().numpy()
same = {
    name: int((rounded(inside, dtype) == by_fp8ref(inside, dtype)).sum())
    for name, rounded in everyone.items()
    for dtype in (E4M3, E5M2)
}
assert set(same.values()) == {len(inside)}  # inside the range nobody differs
past = np.array([464.1, 1e9, inf])
overflowed = {name: np.isnan(rounded(past, E4M3)).tolist() for name, rounded in everyone.items()}
assert overflowed["ml_dtypes"] == overflowed["fp8ref, saturate=False"] == [True, True, True]
assert overflowed["fp8ref"] == [False, False, False]
bits = {
    "torch": int(torch.tensor(nan).to(E5M2).view(torch.uint8)),
    "ml_dtypes": int(np.array(nan).astype(ml_dtypes.float8_e5m2).view(np.uint8)),
    "fp8ref": int(fp8ref.round_to_fp8(torch.tensor(nan), E5M2).view(torch.uint8)),
}
plots.Table(["NaN in e5m2 as", "code"], [[name, hex(code)] for name, code in bits.items()])

# %% [markdown]
"""
Up to `448` all libraries agree on every one of 300,001<!--= {len(inside):,} --> float32 values in both formats. Past the range they do not, not even between
versions of the same library: torch before `2.12` turns `464.1` into NaN.

## The answer

Between its smallest normal and its largest number e4m3 is off by at most 5.88 %<!--= {100 * flat[E4M3]:.2f} % --> and e5m2 by at most 11.11 %<!--= {100 * flat[E5M2]:.2f} % -->, below that values lose bits and vanish, above
it they saturate, so scaling decides more than the choice of the format.
Libraries agree inside the range and disagree beyond it and from float64, so a test that compares bits must fix saturation, must round
once, and must not trust `.to`.
"""
