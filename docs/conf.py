"""How the documentation is built: MyST-NB runs every page's code on four host devices, and a failing cell fails it."""

import os
from importlib.metadata import version as _version

# The kernels that run the pages inherit these. jax reads them when it is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_X64", "1")
os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
# tqdm, which NumPyro imports, finds a notebook without widgets and warns.
os.environ.setdefault("PYTHONWARNINGS", "ignore:IProgress not found")

project = "ppleffects"
author = "The ppleffects maintainers"
project_copyright = author
release = _version("ppleffects")
version = release

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
nitpicky = False
html_theme = "furo"
html_title = "ppleffects"

myst_enable_extensions = ["colon_fence", "dollarmath", "amsmath"]
myst_heading_anchors = 3

# "force": a cache would not see that the library has changed, and would show what an older one printed.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_show_tb = True

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
