"""Which modules hold a linear layer that can be quantised, and where its weight is."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is the ``Conv1D`` of GPT-2: a linear layer of transformers with its weight as [K, N].

    >>> is_conv1d(nn.Conv1d(1, 1, 1))
    False
    """
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a linear layer of some kind, convertible or not.

    >>> is_linear(nn.Linear(2, 2)), is_linear(nn.Embedding(2, 2))
    (True, False)
    """
    return isinstance(module, nn.Linear) or is_conv1d(module)


def obstacle(module: nn.Module) -> str | None:
    """Why a module cannot become a :class:`fp8ref.Fp8Linear` as it stands, with the remedy; None where it can.

    >>> obstacle(nn.Linear(2, 2)), obstacle(nn.Embedding(2, 2))
    (None, 'an Embedding, no linear layer')
    """
    if not is_linear(module):
        kind = type(module).__name__
        return f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}, no linear layer"
    if parametrize.is_parametrized(module):
        names = ", ".join(str(name) for name in module.parametrizations)  # type: ignore[union-attr]
        return f"its {names} is parametrised: torch.nn.utils.parametrize.remove_parametrizations first"
    if type(module) is not nn.Linear and not is_conv1d(module):
        return f"{type(module).__name__} is a subclass of Linear that may compute something else"
    if "weight" not in module._parameters or "bias" not in module._parameters:  # noqa: SLF001 - where a Parameter is
        return "its weight or bias is no Parameter, but computed by a hook (weight_norm?): remove the hook first"
    if "forward" in vars(module) or any(vars(module).get(hooks) for hooks in _HOOKS):
        return "it has hooks, or a forward of its own, which a new layer would lose: remove them first"
    weight = module._parameters["weight"]  # noqa: SLF001 - the same
    if weight is None or weight.dtype not in _FLOATS:
        return f"its weight is {None if weight is None else weight.dtype}, nothing to be quantised"
    return None


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a convertible module as [N, K], a view, detached.

    >>> weight_of(nn.Linear(3, 2)).shape
    torch.Size([2, 3])
    """
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach().t() if is_conv1d(module) else weight.detach()


def check_weight(weight: Tensor, argument: str) -> None:
    """Raise ValueError unless a weight has values, all of them finite."""
    if weight.device.type == "meta":
        raise ValueError(
            f"{argument}: its weight is on the meta device, without values; load the model's weights first"
        )
    # NaN passes through both ends, and one reading of the weight gives them.
    if weight.numel() and not bool(torch.stack(weight.aminmax()).isfinite().all()):
        raise ValueError(f"{argument}: its weight holds NaN or Inf; a layer of it would be wrong from the start")
