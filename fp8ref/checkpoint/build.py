"""A model of transformers without weights, from the config of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from fp8ref.checkpoint.findings import CheckpointError
from fp8ref.emulation.checks import first_line


def build_model(folder: Path) -> nn.Module:
    """Build the model that config.json describes: parameters on the meta device, weights tied as the config says.

    Raises:
        ImportError: transformers or accelerate is missing.
        CheckpointError: transformers does not know the architecture, or cannot build it.
    """
    try:
        import transformers
        from accelerate import init_empty_weights
    except ModuleNotFoundError as error:
        raise ImportError(
            f"loading a checkpoint without model= needs {error.name}; run: pip install 'fp8ref[checkpoints]', or build "
            "the model yourself and give it as model="
        ) from None
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config: Any = transformers.AutoConfig.from_pretrained(str(folder), **options)
        # The layers are replaced here; transformers would otherwise take the model for one that it quantised itself.
        for holder in (config, getattr(config, "text_config", None)):
            if hasattr(holder, "quantization_config"):
                delattr(holder, "quantization_config")
        known = _known_class(transformers, config.architectures or [])
        with init_empty_weights(include_buffers=False):
            built: Any = (
                known(config)
                if known
                else transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            )
        built.tie_weights()
    except Exception as error:  # whatever the parts of transformers raise: it all means that there is no model
        raise CheckpointError(
            f"{folder}: config.json: transformers cannot build the model: {first_line(error)}"
        ) from error
    if (folder / "generation_config.json").is_file():
        try:
            built.generation_config = transformers.GenerationConfig.from_pretrained(str(folder), local_files_only=True)
        except (OSError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder}: generation_config.json: transformers cannot read it: {error}") from error
    model: nn.Module = built.eval()
    return model


def _known_class(transformers: Any, names: list[str]) -> Any:
    """The first of the architectures that is a model of transformers, and no other name in there; None without one."""
    found = (getattr(transformers, name, None) for name in names)
    return next((kind for kind in found if isinstance(kind, type) and issubclass(kind, nn.Module)), None)
