"""Runs ``mamf`` as ``python -m mamf``."""

import sys

from mamf.cli import main

sys.exit(main())
