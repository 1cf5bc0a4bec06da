"""Sphinx configuration of the documentation site: ``make docs``."""

from __future__ import annotations

import shutil
from importlib.metadata import version as installed_version
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

# Sphinx reads what lies under this folder: the notebooks come as copies, made anew by every build.
COPIES = HERE / "notebooks"
shutil.rmtree(COPIES, ignore_errors=True)
COPIES.mkdir()
for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
    shutil.copy(notebook, COPIES / notebook.name)

project = "fp8ref"
author = "the fp8ref authors"
version = release = installed_version("fp8ref")
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "notebooks/*.py"]
html_theme = "furo"
html_title = f"fp8ref {version}"
html_show_sphinx = False
templates_path: list[str] = []

# The notebooks bring their outputs; `make notebooks` is what executes them.
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]

napoleon_google_docstring = True
napoleon_numpy_docstring = False
# As fields: an attribute that is also a member would be described twice.
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# Other projects' inventories would have to be fetched: a build must not need the network.
intersphinx_mapping: dict[str, tuple[str, None]] = {}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
