"""Open the accelerator of this machine. Without one, the modules that import this module are skipped."""

import pytest

from mamf.errors import MamfError
from mamf.plugins.discovery import open_backend

try:
    ACCELERATOR = open_backend("auto")
except MamfError:
    ACCELERATOR = None
if ACCELERATOR is None or not ACCELERATOR.is_accelerator:
    pytest.skip("no accelerator on this machine", allow_module_level=True)
